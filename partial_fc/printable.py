"""Escapes for names of classes, files and hosts, which may hold characters that move a terminal's cursor, set its
title, or split a line of a log or table."""

import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from partial_fc import terminal

# C0 and C1, DEL, line and paragraph separators, and right-to-left controls; halves of surrogate pairs, by which Python
# represents file names that are not UTF-8.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPED |= {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"}
_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\t\n"}


def name(text: object) -> str:
    """Returns a name as one word of a line or one field of a table, with unsafe characters as backslash escapes."""
    return str(text).translate(_ESCAPED).encode("utf-8", "backslashreplace").decode()


def lines(text: object) -> str:
    """Returns a message or a page, escaped alike, but with its line ends and tabs."""
    return str(text).translate(_LINES).encode("utf-8", "backslashreplace").decode()


def some(names: Sequence[str], most: int = 8) -> str:
    """Returns the names as a list for a message, the first ones if there are many."""
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


class Formatter(logging.Formatter):
    """Escapes a log record's text by `lines`."""

    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))


_format_warning = warnings.formatwarning


def clean_stderr() -> None:
    """Routes Python's output on stderr (warnings, log records without a handler, uncaught errors) through `lines`."""
    warnings.formatwarning = lambda *args, **options: lines(_format_warning(*args, **options))
    if logging.lastResort:
        logging.lastResort.setFormatter(Formatter())
    sys.excepthook = lambda *error: print(lines("".join(traceback.format_exception(*error))), end="", file=sys.stderr)


class Lines:
    """A text stream for people, escaped by `lines` and fitted to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.plain = stream

    def write(self, text: str) -> int:
        self.plain.write(terminal.fitted(lines(text), self.plain))
        return len(text)

    def writelines(self, texts: list[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, attribute: str) -> object:
        return getattr(self.plain, attribute)
