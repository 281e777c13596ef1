"""Measurements, to be run again: those that docs/benchmarks.md quotes, and of the head and the loader alone."""
