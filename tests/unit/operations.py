"""Counts what a computation hands to torch: operations, numbers that the host waits for, bytes read and written.

Tensors of the CPU are enough for it. On a GPU every operation counted is a launch (views and empty tensors are not
counted), and at every wait the host stands still until the device has come so far.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result has a shape that depends on numbers, or which give a number to Python.
_WAITING = {"nonzero", "_unique2", "unique_consecutive", "bincount", "masked_select", "_local_scalar_dense", "equal"}
_MADE_OF_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "_unsafe_view"}


class Operations(TorchDispatchMode):
    """Use it as a context: counts what happens within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.num_bytes = 0  # read and written, but for single numbers
        self._paused = False
        self._python = _NumbersForPython(self)

    @property
    def count(self) -> int:
        return self.names.total()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Counts nothing within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __enter__(self) -> "Operations":
        self._python.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._python.__exit__(*error)

    def waited(self, name: str) -> None:
        if not self._paused:
            self.waits[name] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function._schema.name.removeprefix("aten::")
        if self._paused or function.is_view or name in _MADE_OF_NOTHING:
            return result
        self.names[name] += 1
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _WAITING or by_mask:
            self.waits[f"{name} by a mask" if by_mask else name] += 1
        self.num_bytes += sum(_bytes(name, args, kwargs, result))
        return result


def _bytes(name: str, args: Any, kwargs: Any, result: Any) -> Iterator[int]:
    """Of what is read and written. What is changed in place is an operand and a result: read once and written once."""
    operands = [t.nbytes for t in tree_leaves((args, {**kwargs, "out": None})) if isinstance(t, Tensor) and t.dim()]
    results = [t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor) and t.dim()]
    match name.removesuffix("_"):
        case "index_select" | "index" | "gather":  # of the first operand only what is chosen
            yield from (*operands[1:], *results, *results)
        case "index_copy" | "index_put" | "scatter":  # of the first operand, and of the result, what the last one is
            yield from (*operands[1:], operands[-1])
        case "fill" | "zero":
            yield from results
        case "copy":
            yield from (*operands[1:], *results)
        case _:
            yield from (*operands, *results)


class _NumbersForPython(TorchFunctionMode):
    """`tolist` and its like do not pass through the dispatcher where a tensor lies on the CPU."""

    _WAITING = (Tensor.tolist, Tensor.numpy, Tensor.cpu)

    def __init__(self, operations: Operations):
        super().__init__()
        self._operations = operations

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._WAITING:
            self._operations.waited(function.__name__)
        return function(*args, **(kwargs or {}))
