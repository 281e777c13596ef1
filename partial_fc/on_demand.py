"""Names of a package that are imported when they are asked for: what needs torch takes seconds, and who only asks for
help, or reads data, starts without it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the package's `__getattr__` (PEP 562). modules: name -> the module of the package that has it."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find
