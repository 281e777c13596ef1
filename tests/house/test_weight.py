"""What the project weighs: the tables here are its budget. Who adds says so here, and what leaves for it.

`python -m pytest tests/house/test_weight.py -s` prints each table beside what is there.
"""

import ast
import importlib
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from partial_fc.flags import command_line

ROOT = Path(__file__).parents[2]

# Lines of Python that the wheel installs, at most.
WHEEL = {
    "partial_fc": 2_215,
    "partial_fc/checkpoint": 2_350,
    "partial_fc/comm": 2_700,
    "partial_fc/data": 5_470,
    "partial_fc/embedding": 755,
    "partial_fc/evaluate": 905,
    "partial_fc/flags": 1_170,
    "partial_fc/foreign": 1_140,
    "partial_fc/head": 7_860,
    "partial_fc/models": 985,
    "partial_fc/optim": 680,
    "partial_fc/train": 4_150,
    "partial_fc/verbs": 4_715,
    "recipes": 7_600,
}
TOGETHER = {"partial_fc": 35_025, "wheel": 42_600, "tests": 35_445, "python": 84_900, "patches": 615, "words": 41_835}
FLAGS = {"face": 103, "imagenet": 97, "kinetics": 87, "mnist": 52}

# Names of other programs' systems, which the core leaves to their recipes. comm/ alone knows Horovod; foreign/ reads
# arcface_torch's and InsightFace's files, recipe_table.py is the table of the recipes, file_kind.py names other
# programs' files by their first bytes.
SYSTEMS = re.compile(r"caffe2|gluoncv|\bapex\b|kvstore|mxnet|leveldb", re.IGNORECASE)
KNOW_SYSTEMS = ("partial_fc/foreign/", "partial_fc/recipe_table.py", "partial_fc/file_kind.py")


def tracked(*patterns: str) -> list[Path]:
    told = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True)
    if told.returncode:
        pytest.skip("no git checkout: what is tracked is not known")
    return [path for name in told.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def lines(*patterns: str) -> int:
    return sum(path.read_text().count("\n") for path in tracked(*patterns))


def compared(found: dict[str, int], most: dict[str, int]) -> None:
    for name, value in found.items():
        print(f"{name:24} {value:7,} of {most.get(name, 0):7,}")
    assert found.keys() == most.keys()
    assert {name: value for name, value in found.items() if value > most[name]} == {}


def test_lines_of_the_wheel():
    found: Counter[str] = Counter()
    for path in tracked("partial_fc/*.py", "recipes/*.py"):
        parts = path.relative_to(ROOT).parts
        name = "recipes" if parts[0] == "recipes" else "/".join(parts[: min(2, len(parts) - 1)])
        found[name] += path.read_text().count("\n")
    compared(found, WHEEL)


def test_all_together():
    found = {
        "partial_fc": lines("partial_fc/*.py"),
        "wheel": lines("partial_fc/*.py", "recipes/*.py"),
        "tests": lines("tests/*.py"),
        "python": lines("*.py"),
        "patches": lines("patches/*.patch"),
        "words": sum(len(path.read_text().split()) for path in tracked("*.md")),
    }
    compared(found, TOGETHER)


def test_flags_of_the_recipes():
    modules = {name: importlib.import_module(f"recipes.{name}.main") for name in FLAGS}
    compared({name: len(list(command_line._fields(module.Config))) for name, module in modules.items()}, FLAGS)


def test_names_of_the_package_on_the_pages_are_there():
    missing = set()
    for page in tracked("*.md"):
        for name in re.findall(r"\bpartial_fc(?:\.\w+)+", page.read_text()):
            if page.name != "log.md" and not _is_there(name):
                missing.add(f"{page.name}: {name}")
    assert missing == set()


def _is_there(name: str) -> bool:
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for part in parts[number:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_core_names_no_other_system():
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked("partial_fc/*.py", "partial_fc/*.h", "partial_fc/*.cpp")
        if not str(path.relative_to(ROOT)).startswith(KNOW_SYSTEMS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SYSTEMS.search(line)
    }
    assert found == set()


def test_no_function_has_more_lines_than_a_screen():
    """But for Triton's kernels, each of which is one function."""
    longest = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in tracked("partial_fc/*.py", "recipes/*.py")
        if not path.name.startswith("triton_")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {name: length for name, length in longest.items() if length > 80} == {}
