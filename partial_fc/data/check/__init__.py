"""Checks of a data set: `partial-fc doctor data`, and the check before a run (--check-data)."""
