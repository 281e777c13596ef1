"""Evaluations: each yields (name, value) pairs, equal on every rank."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partial_fc.evaluate.classification import Classification
    from partial_fc.evaluate.evaluation import Evaluation
    from partial_fc.evaluate.roc import Roc, plot
    from partial_fc.evaluate.verification import Verification, Verifications

__all__ = ["Classification", "Evaluation", "Roc", "Verification", "Verifications", "plot"]

_MODULES = {
    "Classification": "classification",
    "Evaluation": "evaluation",
    **dict.fromkeys(("Roc", "plot"), "roc"),
    **dict.fromkeys(("Verification", "Verifications"), "verification"),
}


def __getattr__(name: str) -> Any:
    """They are imported when they are asked for: the verbs' help starts without the seconds that torch takes."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
