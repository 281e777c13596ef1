"""Measurements that docs/benchmarks.md quotes, to be run again. (Those for users: `partial-fc bench`.)"""
