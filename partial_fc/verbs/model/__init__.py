"""What one does with a trained model: embed, evaluate, search, classify, convert."""
