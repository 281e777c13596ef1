"""Progress bars on a terminal, and lines above them: the only module for moving output.

A bar is drawn if stderr is a terminal, or if one of our launchers passes our output on to one. In a pipe (that of
horovodrun and mpirun, too) or a file it is a line every 30 s, and nothing for short tasks.

Under a launcher everything goes through one pipe, our stdout, which keeps the order of bar and lines, and each drawing
ends with a carriage return: launchers pass on whole lines and what ends so, and the next line erases the bar.
"""

import functools
import os
import re
import stat
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

WIDTH = "PARTIAL_FC_TERMINAL"  # from our launchers: the columns of their terminal; "": none
_EVERY_S = 30.0  # between the lines in a pipe
_NARROW = 20  # columns; for fewer no line is broken
_AS_LINE = "{desc}: {n_fmt} of {total_fmt}, {remaining} left"
_ERASE = "\033[K"


def told(prefix: str = "") -> dict[str, str]:
    """Returns the variable that describes a launcher's terminal to its processes. prefix: printed before each line."""
    return {WIDTH: str(_columns(1) - len(prefix)) if os.isatty(1) and os.isatty(2) else ""}


def is_watched() -> bool:
    """Returns whether a bar is drawn."""
    return (sys.stderr is not None and sys.stderr.isatty()) or _behind() > 0


def bar(
    items: Iterable[Any] | None = None, *, desc: str, total: int | None = None, shown: bool = True, **more: Any
) -> "tqdm[Any]":
    """Returns a bar over `total`, or over the items as they are iterated. A nested bar replaces the outer one. shown:
    False on all ranks but the one that draws. more: of tqdm."""
    from tqdm import tqdm  # launchers do not need it

    stream = sys.stderr
    given = {"total": total, "desc": desc, "position": 0, "miniters": 1, **more}
    if not shown or stream is None:  # the terminal was closed
        return tqdm(items, disable=True, **given)
    if stream.isatty():
        return tqdm(items, file=stream, dynamic_ncols=True, **given)
    if columns := _behind():
        return tqdm(items, file=_Through(_stdout(), "\r"), ncols=columns - 1, **given)
    return tqdm(
        items,
        file=_Through(stream, "\n"),
        **given | {"bar_format": _AS_LINE, "mininterval": _EVERY_S, "delay": _EVERY_S},
    )


def say(text: str) -> None:
    """Prints whole lines without breaking a bar, in one write: launchers put the rank before each piece."""
    from tqdm import tqdm

    text = fitted(text, sys.stdout)
    if _behind():
        _stdout().write(f"{_ERASE}{text}\n")
    else:
        tqdm.write(text + "\n", file=sys.stdout, end="")
    sys.stdout.flush()


def _stdout() -> TextIO:
    """Returns the stream below printable.Lines, which would escape what moves the cursor."""
    return getattr(sys.stdout, "plain", sys.stdout)


def fitted(text: str, stream: TextIO) -> str:
    """Returns a text for a stream: on a terminal, lines that are too long are broken at blanks, but not within
    `quotes`, which people copy; their rest is indented. Lines with colours stay."""
    columns = _columns(stream.fileno()) if stream.isatty() else _behind()
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if len(line) > columns >= _NARROW and "\033" not in line:
            whole = re.sub(r"`[^`]+`", lambda quoted: quoted[0].replace(" ", "\0"), line)
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            lines[number] = textwrap.fill(
                whole, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ).replace("\0", " ")
    return "\n".join(lines)


class _Through:
    """A stream for tqdm, each of whose drawings ends with `end`."""

    def __init__(self, stream: TextIO, end: str) -> None:
        self._stream, self._end = stream, end
        self.encoding = stream.encoding

    def flush(self) -> None:
        self._stream.flush()

    def write(self, text: str) -> None:
        text = text.strip() if self._end == "\n" else text.removeprefix("\r")
        if text:
            self._stream.write(text if text.endswith("\n") else text + self._end)


@functools.cache
def _behind() -> int:
    """Returns the columns of the terminal that one of our launchers passes our stdout on to; 0: there is none."""
    try:
        mode = os.fstat(1).st_mode
    except OSError:
        return 0
    columns = os.environ.get(WIDTH, "")
    if stat.S_ISREG(mode) or not columns.isdecimal():  # redirected by the command, or no launcher of ours
        return 0
    return int(columns)


def _columns(descriptor: int) -> int:
    return os.get_terminal_size(descriptor).columns or 80
