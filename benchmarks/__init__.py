"""What docs/benchmarks.md quotes, to be run again: `partial-fc bench`."""
