"""Trains a recipe: `python train.py RECIPE --help` lists its flags.

horovodrun -np 2 -H localhost:2 python train.py face --rec DIR     one process a GPU, or a CPU core
python train.py face --gpus 2 --rec DIR                            the same over torch.distributed, and no launcher
torchrun --nproc_per_node=2 train.py face --rec DIR                the same; srun likewise
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
    "mnist": "the PyTorch tutorial's job: ConvNet on MNIST files, data parallel, mixed precision",
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
    from partial_fc import comm

    try:
        return importlib.import_module(f"recipes.{name}").main(arguments[1:]) or 0
    except (ValueError, FloatingPointError, comm.StartError, comm.CollectiveError) as error:
        # The user's mistake, the data's or the network's: the message says what, where and what to do; a trace would
        # bury it.
        if os.environ.get("PARTIAL_FC_TRACE"):
            raise
        print(f"train.py {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"train.py {name}: interrupted", file=sys.stderr)
        return 130


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
