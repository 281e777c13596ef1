"""Inference with a trained backbone: the embedding, and a model with its input contract (model.py), and the files
that it loads from (load.py). The only way to embeddings of a trained model."""
