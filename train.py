"""Trains a recipe: `python train.py RECIPE --help` lists its flags.

horovodrun -np 2 -H localhost:2 python train.py face --rec DIR     one process a GPU, or a CPU core
python train.py face --gpus 2 --rec DIR                            the same over torch.distributed, and no launcher
torchrun --nproc_per_node=2 train.py face --rec DIR                the same; srun likewise
python train.py face --rec DIR                                     one process
"""

import difflib
import errno
import importlib
import logging
import os
import sys
from pathlib import Path

RECIPES = {
    "face": "very many classes: backbone, Partial FC, verification (InsightFace records, image folders, synthetic)",
    "mnist": "the PyTorch tutorial's job: ConvNet on MNIST files, data parallel, mixed precision",
}

_NOT_ALLOWED = "`ls -ld` shows to whom it belongs, `mount` whether it is read-only; or take another folder"
TO_DO = {
    errno.ENOENT: "is the path right, and is it there on this host?",
    errno.ENOTDIR: "a part of that path is a file, where a folder is expected",
    errno.ENOSPC: "`df -h` and `df -i` show which disk is full; make room or give another --models-root, then go on "
    "from the last checkpoint",
    errno.EDQUOT: "`quota` shows what you may use; make room or give another --models-root, then go on from the last "
    "checkpoint",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: _NOT_ALLOWED,
    errno.EMFILE: "`ulimit -n` shows how many files a process may open; allow more, or give fewer --num-workers",
}


def usage() -> str:
    lines = [f"  {name:10} {summary}" for name, summary in RECIPES.items()]
    return f"{__doc__}\nrecipes:\n" + "\n".join(lines)


def main() -> int:
    """Returns the exit status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name = arguments[0]
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES)
        print(
            f"train.py: no recipe {name!r}; {f'did you mean {near[0]}?' if near else ''}\n{usage()}",
            file=sys.stderr,
        )
        return 1
    from safetensors import SafetensorError

    from partial_fc import comm

    try:
        return importlib.import_module(f"recipes.{name}").main(arguments[1:]) or 0
    except (ValueError, FloatingPointError, OSError, SafetensorError, comm.CollectiveError) as error:
        # The user's mistake, the data's, the disk's or the network's: the message says what, where and what to do; a
        # trace would bury it.
        if os.environ.get("PARTIAL_FC_TRACE"):
            raise
        print(f"train.py {name}: {in_words(error)}", file=sys.stderr, flush=True)
        comm.last_words(error)
        return 1
    except KeyboardInterrupt as error:
        print(f"train.py {name}: interrupted", file=sys.stderr, flush=True)
        comm.last_words(error)
        return 130


def in_words(error: Exception) -> str:
    """What the user reads. The operating system's errors say what failed, not what to do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = f": {error.filename}" if error.filename else ""
    to_do = TO_DO.get(error.errno or 0, "see whether the path is right, and its host and disk in order")
    return f"{error.strerror}{where}; {to_do}. (PARTIAL_FC_TRACE=1 shows where this happened)"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    status = main()
    # All is written and closed, or has failed. Python's own end is skipped: threads of torch.distributed's Gloo that
    # let go of their last tensors just then ask for an interpreter that is gone, and the process ends with SIGABRT
    # (https://github.com/pytorch/pytorch/issues/190489): a finished run counted as failed, seldom, but it did. After a
    # failed collective the backends' own ends may also wait for the ranks that are missing.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
