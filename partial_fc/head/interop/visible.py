"""What code that knows nothing of heads finds in one: the centres among its buffers, and its facts in the state.

Weight averaging, swapping and comparing walk a module's buffers, or the tensors of its state_dict, and read or
overwrite them in place.
"""

import json
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.head.rows import RowTable

# Asked what kind of tensor it is, a buffer creates no rows.
_ASKS = ("size", "numel", "nelement", "dim", "stride", "element_size", "is_floating_point", "is_complex", "__get__")
_REFUSED = ("__set__", "requires_grad_", "set_", "resize_", "share_memory_")


class Shown(Protocol):
    """What is asked of a head."""

    world: World
    store: RowTable

    def load_facts(self, facts: dict[str, Any], /) -> None: ...


class CentreRows(Tensor):
    """A buffer that stands for a rank's centres, (L, D). Operations in Python read and write the rows themselves, all
    created and brought up to the last step. C++ sees one zero: DistributedDataParallel, which gives every rank the
    buffers of rank 0, changes no shard."""

    head: "weakref.ref[Shown]"

    @staticmethod
    def of(head: "Shown") -> "CentreRows":
        buffer = head.store.centre_LD.new_zeros(1).as_subclass(CentreRows)
        buffer.head = weakref.ref(head)
        buffer._ddp_ignored = True  # type: ignore[attr-defined]  # DistributedDataParallel casts the other buffers
        return buffer

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("detach", "detach_") or (name, attribute) == ("__get__", "data"):
            return args[0]
        if name in _REFUSED:
            remedy = "change values in place, or make the head with other device= and storage="
            raise ValueError(f"{attribute or name} of a head's centres, which stay as they are stored: {remedy}")

        def rows_of(value: Any) -> Any:
            if isinstance(value, CentreRows) and (head := value.head()):
                return head.store.centre_LD if name in _ASKS else head.store.rows_in_place()
            return type(value)(map(rows_of, value)) if type(value) in (list, tuple) else value

        try:
            return func(*rows_of(args), **{key: rows_of(value) for key, value in (kwargs or {}).items()})
        except RuntimeError as error:
            error.add_note("A copy made before a head was sharded or resized has centres of another shape.")
            raise


class Facts(Tensor):
    """The bytes of `_extra_state`. Code that averages states tensor by tensor (timm's ModelEmaV3) gives one head the
    facts of another with `copy_`, whatever their lengths. Elsewhere it is, and is saved as, a plain tensor."""

    head: "Shown"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(head: "Shown", text: bytes) -> "Facts":
        facts = torch.frombuffer(bytearray(text), dtype=torch.uint8).as_subclass(Facts)
        facts.head = head
        return facts

    def copy_(self, src: Tensor, non_blocking: bool = False) -> "Facts":
        common = read_facts(src)
        self.head.load_facts(common["facts"] if isinstance(common, dict) else self._refuse())
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        remedy = "average the floating entries of a state and copy the others, or average parameters() and buffers()"
        raise ValueError(f"{self.head.world}: arithmetic with a head's _extra_state, which is text: {remedy}")

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = add_ = sub_ = mul_ = div_ = lerp_ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()


def read_facts(t: Any) -> Any:
    """Returns what `_extra_state` says; None where it is no JSON. t: a tensor, or what people made of its JSON."""
    try:
        return json.loads(bytes(t.tolist())) if isinstance(t, Tensor) else t
    except (TypeError, ValueError):
        return None
