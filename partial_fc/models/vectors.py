"""Networks whose input is a vector: `none`, `linear`, `mlp:WIDTH`."""

from torch import nn

from partial_fc.models.encoders import OutputLinear
from partial_fc.models.inputs import Unchanged


def is_of_vectors(name: str) -> bool:
    """Tells whether a network's name is one of these."""
    return name in ("none", "linear") or name.startswith("mlp:")


def build(name: str, embedding_size: int, input_size: int) -> nn.Module:
    """Builds it with fresh weights: (N, input_size) -> (N, embedding_size). none: the vector itself; linear: one linear
    layer; mlp:WIDTH: another before it, with GELU between. Raises ValueError for other sizes or names."""
    width = name.removeprefix("mlp:")
    if name == "none" and embedding_size != input_size:
        raise ValueError(f"network none: vectors have {input_size} numbers; the embedding has {embedding_size}")
    if name.startswith("mlp:") and not (width.isdecimal() and 0 < int(width) <= 65536):
        raise ValueError(f"network {name}: expected mlp:WIDTH, WIDTH 1 to 65536, as in mlp:512")
    module: nn.Module = nn.Identity()
    if name == "linear":
        module = OutputLinear(input_size, embedding_size)
    elif name != "none":
        module = nn.Sequential(nn.Linear(input_size, int(width)), nn.GELU(), OutputLinear(int(width), embedding_size))
    module.to_input = input_of(input_size)  # type: ignore[assignment]
    return module


def input_of(input_size: int) -> Unchanged:
    """Returns the input contract."""
    return Unchanged(f"float32 (N, {input_size}), vectors", unit="vectors")
