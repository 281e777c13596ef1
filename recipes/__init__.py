"""What to train: one file a task. Each has `Config`, whose fields are the command line, `parse` and `main`."""
