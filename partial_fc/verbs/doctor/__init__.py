"""`partial-fc doctor`: checks training data and hosts before a run."""
