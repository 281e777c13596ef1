"""Checks before a run starts: its folders, and its differences from the run that it resumes."""
