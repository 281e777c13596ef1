"""A small network as MXNet's users have them: with a loss layer, a dropout, a batch norm with a fixed gamma."""

from typing import Any

import torch
from torch import Tensor


def small_network(mx: Any) -> Any:
    """Pixels of square images -> fc1 (8 wide) -> ten classes."""
    x = (mx.sym.Variable("data") - 127.5) * 0.0078125
    x = mx.sym.Convolution(x, num_filter=4, kernel=(3, 3), stride=(2, 2), pad=(1, 1), no_bias=True, name="conv0")
    x = mx.sym.BatchNorm(x, name="bn0")
    x = mx.sym.LeakyReLU(x, act_type="prelu", name="relu0")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool0")
    x = mx.sym.Dropout(x, p=0.3, name="drop0")
    x = mx.sym.FullyConnected(x, num_hidden=8, name="pre_fc1")
    x = mx.sym.BatchNorm(x, fix_gamma=False, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="fc7"), name="softmax")


def arrays_of(mx: Any, symbol: Any, image_size: int) -> dict[str, Tensor]:
    """Random arrays by the names of a .params file."""
    random = torch.Generator().manual_seed(0)
    shapes, _, states = symbol.infer_shape(data=(2, 3, image_size, image_size))
    arrays = {f"arg:{n}": s for n, s in zip(symbol.list_arguments(), shapes, strict=True)}
    del arrays["arg:data"], arrays["arg:softmax_label"]
    arrays |= {f"aux:{n}": s for n, s in zip(symbol.list_auxiliary_states(), states, strict=True)}
    return {n: torch.rand(shape, generator=random) * 0.5 + 0.25 for n, shape in arrays.items()}
