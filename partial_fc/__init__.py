"""Training of models whose last layer has millions of classes, sharded over many processes."""

__version__ = "0.1.0"
