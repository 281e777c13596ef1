"""Measurements, to be run again: those that docs/benchmarks.md quotes, and the head (head.py) and the loader (data.py) alone."""
