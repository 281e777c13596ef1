"""The verbs that use a trained model: embed, evaluate, search, classify, export, convert."""
