"""What mkdocs (`make docs`) does not do: pages and files outside docs/ get a place in the site, and links lead there.
So the same links work in a checkout, on a forge and in the site, and no address of the repository is needed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The path of a link: neither an address nor an anchor of the same page.
_LINK = re.compile(r"(?<=\]\()[^)\s#:]+")


def place(path: Path) -> str:
    """Where a file of the repository lies in the site's sources: docs/data.md is data.md, SECURITY.md stays."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def linked(page: Path) -> Iterator[Path]:
    for link in _LINK.findall(page.read_text()):
        path = Path(os.path.normpath(page.parent / link))
        if path.is_file():
            yield path


def on_files(files, config):
    wanted = {*ROOT.glob("*.md"), *(path for page in DOCS.rglob("*.md") for path in linked(page))}
    wanted |= {path for page in ROOT.glob("*.md") for path in linked(page)}
    for path in sorted(wanted):
        if not path.is_relative_to(DOCS):
            # mkdocs would leave out .github.
            kept = InclusionLevel.INCLUDED
            files.append(File.generated(config, place(path), abs_src_path=str(path), inclusion=kept))
    return files


def on_page_markdown(markdown, page, **_):
    source = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(source.parent / link[0]))
        if not path.is_file():
            return link[0]  # mkdocs says so
        return os.path.relpath(place(path), Path(place(source)).parent)

    return _LINK.sub(moved, markdown)
