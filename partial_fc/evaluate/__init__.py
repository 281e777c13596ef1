"""Evaluations: each yields (name, value) pairs, equal on every rank."""

from partial_fc.evaluate.roc import Roc, plot
from partial_fc.evaluate.verification import Verification

__all__ = ["Roc", "Verification", "plot"]
