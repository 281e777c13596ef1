"""Inert stand-ins for the classes and functions that a file of torch.save names beside tensors: hyper-parameters such
as argparse.Namespace, pathlib.Path and OmegaConf's, NumPy's numbers, and the modules of a whole model. torch's own
unpickler for untrusted files reads them; a stand-in keeps what it is given, and executes nothing."""

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ASKED = re.compile(r"GLOBAL (\S{1,200}) was not an allowed")  # in torch's messages
_APPENDED = re.compile(r"lists, but got <class '[\w.]*unknown_classes\.(\S{1,200})'>")
_MOST_NAMES = 300


class _Filled(type):
    """The type of stand-ins. Equal to OrderedDict, so that torch's unpickler puts a dictionary's items into one."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is OrderedDict

    __hash__ = type.__hash__


class Unknown(metaclass=_Filled):
    """A value of a class that is not known here, which names its subclass. content: its attributes and items."""

    content: dict[Any, Any]

    def __new__(cls, *_: Any, **__: Any) -> "Unknown":
        made = super().__new__(cls)
        made.content = {}
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # of a class with slots: two dictionaries
            self.content.update(part if isinstance(part, dict) else {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content[key] = value


def load(path: str | Path) -> Any:
    """Calls torch.load, for tensors and plain values on the CPU, with an Unknown in place of any other value. Raises
    what it raises for a file that is damaged, or asks for what torch always refuses (module os)."""
    zipped, names, lists = zipfile.is_zipfile(path), set[str](), set[str]()
    while True:
        # Some make lists, as torch's unpickler appends to those only.
        own: dict[str, Any] = {name: {"__new__": lambda *_, **__: []} if name in lists else {} for name in names}
        known: list[Any] = [(_Filled(name, (Unknown,), content), name) for name, content in own.items()]
        try:
            with torch.serialization.safe_globals(known):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError as error:
            asked, appended = _ASKED.search(str(error)), _APPENDED.search(str(error))
            more = {asked[1] if "." in asked[1] else f"builtins.{asked[1]}"} if asked else set()
            if more and zipped:
                more.update(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            as_lists = {appended[1]} if appended else set()
            if (more <= names and as_lists <= lists) or len(names | more) > _MOST_NAMES:
                raise
            names, lists = names | more, lists | as_lists


def tensors_of(module: Any, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields the state dict of a whole module (torch.save(model)), each part of it once; nothing of other values."""
    seen = set() if seen is None else seen
    if not isinstance(module, Unknown) or id(module) in seen or len(prefix) > _MOST_NAMES:
        return
    seen.add(id(module))
    for kind in ("_parameters", "_buffers", "_modules"):
        part = module.content.get(kind)
        for name, value in part.items() if isinstance(part, dict) else ():
            if isinstance(value, Tensor):
                yield f"{prefix}{name}", value
            elif kind == "_modules":
                yield from tensors_of(value, f"{prefix}{name}.", seen)
