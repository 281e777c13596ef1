"""A trained backbone at work: what an embedding is (definition.py), a model with its input contract (model.py), the
files that it is loaded from (load.py). All that asks for embeddings of a trained model gets them here."""
