"""Optimizers of torch's without what only torch.compile needs."""

from inspect import unwrap
from typing import Any, TypeVar

import torch

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def eager(optimizer: type[_Optimizer]) -> type[_Optimizer]:
    """The same arithmetic without the wrappers that torch.compile asks for: their first call imports torch._dynamo,
    which takes each process of a run two seconds and some 200 MB."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain: dict[str, Any] = {name: unwrap(getattr(optimizer, name)) for name in names}
    plain["step"] = torch.no_grad()(unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), plain)
