"""Errors of the user, printed on one line: what, where and what to do."""

import errno
import importlib.util
import json
import os
import re
import shlex
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from partial_fc import printable, terminal
from partial_fc.files import replacing

_NOT_ALLOWED = "`ls -ld` shows to whom it belongs, `mount` whether it is read-only; or take another folder"
_FULL = "make room or take a folder on another disk; a training run resumes from its last checkpoint"
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


# The packages of the extra [train] (setup.cfg) by the names of their modules; protobuf comes with tensorboard.
TRAINER = (
    *("tyro", "cv2", "safetensors", "tensorboard", "tqdm", "psutil", "simplejpeg", "lmdb", "matplotlib"),
    *("jinja2", "PIL", "easydict"),
)


class UsageError(ValueError):
    """An invalid command line: reported with exit status 2, before anything is opened."""


class RefusedByAll(ValueError):
    """All ranks raise it alike, so one of each host prints it."""


def report(program: str, error: Exception, printed: bool = True) -> None:
    """Prints `error` on stderr, after the name of the failed command, without a trace. With PARTIAL_FC_TRACE=1 in the
    environment it is raised again instead. printed: False: only torchrun's file gets it."""
    if os.environ.get("PARTIAL_FC_TRACE"):
        raise error
    text = printable.lines(describe(error))
    if printed:
        print(terminal.fitted(f"{program}: {text}", sys.stderr), file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # Quoted by torchrun in its summary (torch.distributed.elastic.multiprocessing.errors).
        said = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), replacing(Path(path)) as partial:  # printed already; a partial file would end torchrun
            partial.write_text(json.dumps({"message": said}))


def require_trainer(program: str) -> None:
    """Ends the process, with status 1 and one line on stderr, if a package of the extra [train] is not installed."""
    if missing := [name for name in TRAINER if importlib.util.find_spec(name) is None]:
        report(program, UsageError(f"not installed: {', '.join(missing)}, which the commands need: {install('train')}"))
        sys.exit(1)


def install(extra: str) -> str:
    """Returns the command that installs an extra of setup.cfg: of the checkout, where the package runs from one, else
    its packages, as the name partial-fc is on no index. What depends on torch comes from the index of torch's build,
    without replacing it."""
    checkout, words = Path(__file__).parents[1], ["pip", "install"]
    if (checkout / "setup.cfg").is_file():
        words += ["-e", f"{checkout}[{extra}]"]
    else:
        for line in metadata.requires("partial-fc") or ():
            words += [line.partition(";")[0].strip()] if re.search(f"extra == .{extra}.$", line) else []
    torch = next((there.version for there in metadata.distributions(name="torch")), "")
    if torch and extra in ("timm", "lora"):
        words.append(f"torch=={torch}")
    if extra in ("timm", "lora", "train") and (build := re.search(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)$", torch)):
        words += ["--extra-index-url", f"https://download.pytorch.org/whl/{build[1]}"]
    return shlex.join(words)


def package(name: str, what: str, extra: str) -> Any:
    """Imports a package of an extra for what needs it. Raises ValueError, with the command, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{what} needs the package {name} ({error}): `{install(extra)}`") from error


def describe(error: Exception) -> str:
    """Returns the error's message; for those of the operating system, with the remedy."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    to_do = TO_DO.get(error.errno or 0, "see whether the path is right, and its host and disk in order")
    return f"{error.strerror}{where}; {to_do} (PARTIAL_FC_TRACE=1 shows where this happened)"
