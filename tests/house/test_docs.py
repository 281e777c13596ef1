"""Commands and programs on the pages of docs can be typed as they stand: verbs and flags exist, the parser takes them.
(README.md: tests/recipes/first_hour.sh; that programs run: test_library.py.) Links lead somewhere, and the site's
navigation has every page (`make docs` asks mkdocs the same)."""

import importlib
import os
import re
import runpy
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
import tyro

from partial_fc import cli
from partial_fc.flags.command_line import parse
from recipes.mxnet import kvstore_job
from tests.house.test_library import programs

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_STARTS = r"(?:python train\.py|partial-fc|horovodrun|bash config\.sh|bash run\.sh|torchrun|mpirun|srun) "
# Words that stand for something else there: a job of the reader's own, a value, what was said before.
_PLACEHOLDERS = {"...", "JOB.py", "P", "S", "[GROUP]"}


def commands(page: Path) -> list[list[str]]:
    """The words of each indented command of a page, without what is said beside it."""
    text = re.sub(r"\\\n +", "", page.read_text())
    lines = re.findall(rf"^    ({_STARTS}.*)$", text, re.MULTILINE)
    return [shlex.split(re.split(r"\s{2,}|\s# ", line)[0].replace("`", "")) for line in lines]


ALL = [(page.name, words) for page in PAGES for words in commands(page) if not _PLACEHOLDERS & set(words)]


def after(words: list[str], name: str) -> list[str]:
    return words[words.index(name) + 1 :]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)[:70]}" for page, words in ALL])
def test_a_command_is_taken_as_it_stands(page, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("encoder.py", "unseen.bin"):  # of docs/encoders.md and docs/after-training.md
        (tmp_path / name).touch()
    script = next((word for word in words if word in ("train.py", "./train.py", "config.sh", "run.sh")), None)
    if script in ("train.py", "./train.py"):
        recipe, *flags = after(words, script)
    elif script:
        recipe, flags = "face", after(words, script)
        if script == "run.sh":
            while flags and (flags[0] == "--restarts" or not flags[0].startswith("-")):
                flags = flags[2 if flags[0] == "--restarts" else 1 :]
        if not {"--rec", "--dataset", "--config"} & set(flags):
            flags = ["--dataset", "glyphs", "--rec", "demo/glyphs", *flags]
    else:
        name, rest = cli.find(words[1:])
        assert name in cli.VERBS, words
        if name == "launch":
            return  # their own flags end where a command begins: tests/unit/verbs/test_launcher.py
        if name == "train":
            recipe, *flags = rest
        else:
            parse(get_type_hints(cli.load(name))["options"], rest, name)
            return
    job = "mxnet.kvstore_job" if recipe == "mnist" and kvstore_job.asked_for(flags) else f"{recipe}.main"
    importlib.import_module(f"recipes.{job}").parse(flags)


def modules() -> list[list[str]]:
    """The words after `python -m ` of benchmarks and demo on the pages, indented or in quotes."""
    found = []
    for page in [*PAGES, ROOT / "README.md", *(ROOT / "benchmarks").rglob("*.md")]:
        text = page.read_text()
        lines = re.findall(r"^    python -m ((?:benchmarks\.|demo ).*?)(?:\s{2,}.*)?$", text, re.MULTILINE)
        lines += re.findall(r"`python -m ((?:benchmarks\.|demo )[^`]+)`", text)
        found += [shlex.split(line) for line in lines]
    return found


@pytest.mark.parametrize("words", modules(), ids=" ".join)
def test_a_benchmark_and_a_made_set_take_their_words(words, monkeypatch):
    class Taken(Exception):
        pass

    def taken(parser):
        def parse_and_stop(*given, **options):
            parser(*given, **options)
            raise Taken

        return parse_and_stop

    monkeypatch.setitem(sys.modules, "faiss", ModuleType("faiss"))  # of one benchmark; set-up installs none
    monkeypatch.delitem(sys.modules, words[0], raising=False)
    monkeypatch.setattr("sys.argv", ["", *words[1:]])
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("tyro.cli", taken(tyro.cli))
    for parser in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(ArgumentParser, parser, taken(getattr(ArgumentParser, parser)))
    with pytest.raises(Taken):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def test_every_program_is_python():
    found = {page.name: programs(str(page)) for page in PAGES}
    for page, blocks in found.items():
        for block in blocks:
            compile(block, page, "exec")
    assert sum(map(len, found.values())) >= 7


# ---- links, navigation, beginnings

TOP = sorted(ROOT.glob("*.md"))
_CODE = re.compile(r"^```.*?^```|^    .*?$", re.MULTILINE | re.DOTALL)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """As forges and mkdocs make them of the headings."""
    titles = re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TOP + PAGES, ids=names(TOP + PAGES))
def test_links_lead_to_files_and_headings_that_are_there(page):
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", _CODE.sub("", page.read_text())):
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.is_file(), f"{path}: no such file"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}: no such heading"


def test_files_that_are_named_exist():
    """By pages, but those of history: tests and programs. By programs and their messages: pages."""
    pages = [page for page in TOP + PAGES if page.name not in ("CHANGELOG.md", "log.md")]
    named = [(page, r"\b(?:tests|benchmarks|scripts)/[\w/]+\.\w+") for page in pages]
    folders = ("partial_fc", "recipes", "benchmarks", "demo", "scripts")
    named += [(path, r"\bdocs/[\w/-]+\.md") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {(by.name, name) for by, pattern in named for name in re.findall(pattern, by.read_text())}
    assert len(found) > 80
    assert {(by, name) for by, name in found if not (ROOT / name).is_file()} == set()


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(listed) == sorted([*names(TOP), *(str(page.relative_to(ROOT / "docs")) for page in PAGES)])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_a_page_begins_with_what_to_type(page):
    """After at most two lines: a command, or a table whose first column says it."""
    title, *lines = [line for line in page.read_text().splitlines() if line]
    assert title.startswith("# ")
    assert any(line.startswith(("    ", "|", "```sh")) for line in lines[:3])
