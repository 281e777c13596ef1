"""Imports at the top of a file point one way, for folders and for files (those within functions are left alone, but in
the head)."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUND = ""  # the modules directly in partial_fc
ORDER = (
    *({GROUND}, {"flags", "models"}, {"comm"}, {"head", "optim"}, {"checkpoint", "data"}, {"foreign"}, {"embedding"}),
    *({"evaluate"}, {"train"}, {"verbs"}, {"recipe"}, {"recipes"}),
)
FLOOR = {folder: number for number, folders in enumerate(ORDER) for folder in folders}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("partial_fc", "recipes")
    for path in (ROOT / top).rglob("*.py")
}


def imports(nodes: list[ast.stmt], package: list[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (each if (each := f"{module}.{name.name}") in FILES else module for name in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With) and "TYPE_CHECKING" not in ast.unparse(node)[:40]:
            yield from imports([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])], package)


def all_imports(name: str, path: Path) -> Iterator[str]:
    """Also those within functions, and of types alone."""
    package = name.split(".")[: None if path.name == "__init__.py" else -1]
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    yield from (to for to in imports(nodes, package) if to in FILES and to != name)


def folder(module: str) -> str:
    top, *below = module.split(".")
    is_folder = below and ((ROOT / top / below[0]).is_dir() or below[0] == "recipe")
    return top if top != "partial_fc" else below[0] if is_folder else GROUND


def imported(name: str, path: Path) -> set[str]:
    package = name.split(".")[: None if path.name == "__init__.py" else -1]
    return {to for to in imports(ast.parse(path.read_text()).body, package) if to in FILES and to != name}


ARROWS = {name: imported(name, path) for name, path in FILES.items()}


def test_folders_import_only_those_below_them():
    up = [
        f"{of} -> {to}"
        for of, others in ARROWS.items()
        for to in others
        if folder(of) != folder(to) and FLOOR[folder(of)] <= FLOOR[folder(to)]
    ]
    assert up == []


def test_files_form_no_circle():
    TopologicalSorter(ARROWS).prepare()  # raises CycleError, which names the files


def test_files_of_the_head_form_no_circle_in_functions_either():
    ours = {name: path for name, path in FILES.items() if name.startswith("partial_fc.head.")}
    TopologicalSorter(
        {name: {to for to in all_imports(name, path) if to in ours} for name, path in ours.items()}
    ).prepare()


def test_flags_import_nothing_above_them_in_functions_either():
    up = [
        f"{of} -> {to}"
        for of, path in FILES.items()
        for to in all_imports(of, path)
        if folder(of) == "flags" and FLOOR[folder(to)] > FLOOR["flags"]
    ]
    assert up == []
