"""The training loop and what it says."""
