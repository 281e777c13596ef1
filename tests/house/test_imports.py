"""Imports point one way, for folders and for files, those within functions too; not those of types alone."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUND = ""  # the modules directly in partial_fc
ORDER = (
    *({GROUND}, {"flags", "models"}, {"comm"}, {"head", "optim"}, {"checkpoint", "data"}, {"foreign"}, {"embedding"}),
    *({"evaluate"}, {"train"}, {"verbs"}, {"recipe", "cli"}, {"recipes", "__main__"}),
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
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports([child for child in ast.walk(node) if child is not node and _is_import(child)], package)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def folder(module: str) -> str:
    top, *below = module.split(".")
    is_folder = below and ((ROOT / top / below[0]).is_dir() or below[0] in FLOOR)
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
