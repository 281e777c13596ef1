"""The backbone's optimizer: torch's, with names for its state that outlive the order of its parameters."""

from collections.abc import Iterable
from inspect import unwrap
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

Kind = Literal["sgd", "adamw"]
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


class Named(Protocol):
    """A module, or the weights of one (train/precision.py)."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def _eager(optimizer: type[_Optimizer]) -> type[_Optimizer]:
    """The same arithmetic without the wrappers that torch.compile asks for: their first call imports torch._dynamo,
    which takes each process of a run two seconds and some 200 MB."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in names}
    plain["step"] = torch.no_grad()(unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), plain)


_SGD, _AdamW = _eager(torch.optim.SGD), _eager(torch.optim.AdamW)


def build(kind: Kind, module: Named, momentum: float, weight_decay: float) -> torch.optim.Optimizer:
    """Over all parameters that require a gradient. The learning rate is set before each step (`set_lr`)."""
    parameters = [p for _, p in module.named_parameters() if p.requires_grad]
    if kind == "sgd":
        return _SGD(parameters, lr=0.0, momentum=momentum, weight_decay=weight_decay)
    return _AdamW(parameters, lr=0.0, weight_decay=weight_decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_state(optimizer: torch.optim.Optimizer, module: Named) -> dict[str, Tensor]:
    """'<parameter>/<state>' -> tensor, for a checkpoint."""
    return {
        f"{name}/{key}": value
        for name, p in module.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def load_named_state(optimizer: torch.optim.Optimizer, module: Named, state: dict[str, Tensor]) -> None:
    """Takes over what `named_state` gave; what is not in it starts anew. Raises ValueError for a parameter that this
    module does not have."""
    optimizer.state.clear()
    parameters = dict(module.named_parameters())
    for full_name, value in state.items():
        name, _, key = full_name.rpartition("/")
        if name not in parameters:
            raise ValueError(f"optimizer state {full_name!r} belongs to no parameter of this network")
        # AdamW counts its steps in a float on the host; moments live beside their parameter.
        device = "cpu" if key == "step" else parameters[name].device
        optimizer.state[parameters[name]][key] = value.to(device)
