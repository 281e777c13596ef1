"""What the user reads of an error that is not the program's own fault: what, where and what to do, on one line."""

import errno
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from partial_fc import printable
from partial_fc.files import replacing

_NOT_ALLOWED = "`ls -ld` shows to whom it belongs, `mount` whether it is read-only; or take another folder"
_FULL = "make room or take a folder on another disk; a training run goes on from its last checkpoint"
TO_DO = {
    errno.ENOENT: "is the path right, and is it there on this host?",
    errno.ENOTDIR: "a part of that path is a file, where a folder is expected",
    errno.ENOSPC: f"`df -h` and `df -i` show which disk is full; {_FULL}",
    errno.EDQUOT: f"`quota` shows what you may use; {_FULL}",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.EMFILE: "`ulimit -n` shows how many files a process may open; allow more, or give fewer --num-workers",
}


class UsageError(ValueError):
    """A command line that cannot be: told at once, with exit status 2, before anything is opened."""


def report(program: str, error: Exception) -> None:
    """Prints `error` on stderr, after the name of the command that failed: a trace would bury what it says. With
    PARTIAL_FC_TRACE=1 in the environment it is raised again instead."""
    if os.environ.get("PARTIAL_FC_TRACE"):
        raise error
    text = printable.lines(describe(error))
    print(f"{program}: {text}", file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # What torchrun quotes in its summary (torch.distributed.elastic.multiprocessing.errors).
        said = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), replacing(Path(path)) as partial:  # it has been said; half a file would end torchrun
            partial.write_text(json.dumps({"message": said}))


def describe(error: Exception) -> str:
    """The error's own words; where they are the operating system's, which says what failed, also what to do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    to_do = TO_DO.get(error.errno or 0, "see whether the path is right, and its host and disk in order")
    return f"{error.strerror}{where}; {to_do} (PARTIAL_FC_TRACE=1 shows where this happened)"
