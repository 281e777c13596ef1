"""Training recipes, a file per task. Each has `Config`, whose fields are the command line, `parse` and `main`."""
