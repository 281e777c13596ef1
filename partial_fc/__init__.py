"""Training of models whose last layer has millions of classes, sharded over many processes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partial_fc.embedding.load import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`load` is imported when it is asked for: torch takes seconds."""
    if name == "load":
        from partial_fc.embedding.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
