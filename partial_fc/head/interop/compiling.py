"""Keeps the head out of torch.compile's graphs: it waits for other ranks, draws classes and calls C++."""

import sys
from collections.abc import Callable
from typing import Any

import torch

_outside: dict[str, Callable[..., Any]] = {}


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped so that torch.compile calls it without tracing it. function: defined at module or
    class level.

    Not a decorator, and only where something is compiled: torch.compiler.disable imports torch._dynamo, which takes two
    seconds.
    """
    if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
        return function
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in _outside:
        _outside[name] = torch.compiler.disable(function)
    return _outside[name]
