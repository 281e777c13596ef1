"""Training of models whose last layer has millions of classes, sharded over many processes."""

from typing import TYPE_CHECKING

from partial_fc.on_demand import on_demand

if TYPE_CHECKING:
    from partial_fc.embedding.load import load
    from partial_fc.head import PartialFC
    from partial_fc.head.functional import linear_partial_cross_entropy

__version__ = "0.1.0"
__all__ = ["PartialFC", "__version__", "linear_partial_cross_entropy", "load"]

__getattr__ = on_demand(
    __name__, {"load": "embedding.load", "PartialFC": "head", "linear_partial_cross_entropy": "head.functional"}
)
