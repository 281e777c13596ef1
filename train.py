"""Trains a recipe: `python train.py RECIPE --help` lists its flags.

horovodrun -np 2 -H localhost:2 python train.py face --rec DIR     one process a GPU, or a CPU core
torchrun --nproc_per_node=2 train.py face --rec DIR                the same over torch.distributed
python train.py face --rec DIR                                     one process
"""

import difflib
import importlib
import logging
import os
import sys
from pathlib import Path

RECIPES = {
    "face": "very many classes: backbone, Partial FC, verification (InsightFace records, image folders, synthetic)",
}


def usage() -> str:
    lines = [f"  {name:10} {summary}" for name, summary in RECIPES.items()]
    return f"{__doc__}\nrecipes:\n" + "\n".join(lines)


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    name = arguments[0]
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES)
        sys.exit(f"train.py: no recipe {name!r}; {f'did you mean {near[0]}?' if near else ''}\n{usage()}")
    try:
        importlib.import_module(f"recipes.{name}").main(arguments[1:])
    except (ValueError, FloatingPointError) as error:
        # The user's mistake or the data's: the message says what, where and what to do; a trace would bury it.
        if os.environ.get("PARTIAL_FC_TRACE"):
            raise
        sys.exit(f"train.py {name}: {error}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
    # All is written and closed. Python's own end is skipped: threads of torch.distributed's Gloo that let go of their
    # last tensors just then ask for an interpreter that is gone, and the process ends with SIGABRT
    # (https://github.com/pytorch/pytorch/issues/190489): a finished run counted as failed, seldom, but it did.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
