"""Evaluations: each yields (name, value) pairs, equal on every rank."""

from typing import TYPE_CHECKING

from partial_fc.on_demand import on_demand

if TYPE_CHECKING:
    from partial_fc.evaluate.classification import Classification
    from partial_fc.evaluate.evaluation import Evaluation
    from partial_fc.evaluate.roc import Roc, plot
    from partial_fc.evaluate.verification import Verification, Verifications

__all__ = ["Classification", "Evaluation", "Roc", "Verification", "Verifications", "plot"]

__getattr__ = on_demand(
    __name__,
    {
        "Classification": "classification",
        "Evaluation": "evaluation",
        **dict.fromkeys(("Roc", "plot"), "roc"),
        **dict.fromkeys(("Verification", "Verifications"), "verification"),
    },
)
