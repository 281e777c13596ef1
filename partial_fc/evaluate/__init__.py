"""Evaluations: each yields (name, value) pairs, equal on every rank."""

from partial_fc.evaluate.classification import Classification
from partial_fc.evaluate.evaluation import Evaluation
from partial_fc.evaluate.roc import Roc, plot
from partial_fc.evaluate.verification import Verification, Verifications

__all__ = ["Classification", "Evaluation", "Roc", "Verification", "Verifications", "plot"]
