"""Lazy imports of a package's names: those that need torch take seconds, which help and data readers avoid."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the package's `__getattr__` (PEP 562). modules: name -> its module in the package."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find
