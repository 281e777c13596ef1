"""Evaluations: each yields (name, value) pairs, equal on every rank."""
