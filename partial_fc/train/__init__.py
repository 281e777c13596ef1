"""The training loop, its start and end, its guards and its records."""
