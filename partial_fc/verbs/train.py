"""Trains a recipe: `partial-fc train RECIPE --help` lists its flags.
In a checkout `python train.py` is the same.

one process:
  partial-fc train face --rec DIR
two processes, one for each GPU, or on the CPU:
  partial-fc train face --gpus 2 --rec DIR
  horovodrun -np 2 -H localhost:2 partial-fc train face --rec DIR
  torchrun --nproc_per_node=2 -m partial_fc train face --rec DIR
a recipe of your own, a file with a function main(flags):
  partial-fc train ./mine.py --rec DIR
"""

import argparse
import difflib
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from partial_fc import __version__, errors, interrupts, output, recipe_table, terminal
from partial_fc.files import import_file, make_private
from partial_fc.printable import clean_stderr

_CONFIG_BYTES = 1 << 16  # bytes that are examined


def run_and_exit(arguments: list[str], program: str = "partial-fc train") -> NoReturn:
    """Runs `main` and ends the process with its status."""
    interrupts.listen()
    output.detach()
    for variable, (module, values) in recipe_table.SERVE.items():
        if os.environ.get(variable) in values:
            recipe_table.module(module)
    errors.require_trainer(program)
    exit_now(main(arguments, program))


def exit_now(status: int) -> NoReturn:
    """Ends the process without Python's own shutdown; all files are closed, or have failed.

    In that shutdown, threads of torch.distributed's Gloo that free their last tensors need an interpreter that is gone,
    and the process ends with SIGABRT (https://github.com/pytorch/pytorch/issues/190489): rarely, a finished run counted
    as failed. After a failed collective the backends' own shutdown may also wait for missing ranks.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    output.drain()
    os._exit(status)


def main(arguments: list[str], program: str = "partial-fc train") -> int:
    """Runs the recipe named by the first argument with the others as its flags; returns the exit status.

    program: how the user started it, for messages.
    """
    clean_stderr()
    arguments = without_local_rank(arguments, program)
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"partial-fc {__version__}")
        return 0
    name, *flags = arguments
    if name not in recipe_table.RECIPES and (not name.endswith(".py") or _is_config(Path(name))):
        print(terminal.fitted(f"{program}: {_no_recipe(name, program)}", sys.stderr), file=sys.stderr)
        return 2
    from safetensors import SafetensorError

    from partial_fc import comm

    try:
        make_private()
        return _recipe(name).main(flags) or 0
    except errors.UsageError as error:
        errors.report(f"{program} {name}", error)
        return 2
    except (ValueError, FloatingPointError, OSError, SafetensorError, comm.CollectiveError) as error:
        # An error of the data, the disk or the network.
        said_by_another = isinstance(error, errors.RefusedByAll) and comm.detect().local_rank > 0
        errors.report(f"{program} {name}", error, not said_by_another)
        comm.report_failure(error)
        return 1
    except KeyboardInterrupt as error:
        if comm.detect().local_rank == 0:  # all ranks have it
            print(f"{program} {name}: interrupted", file=sys.stderr, flush=True)
        comm.report_failure(error)
        return 130


def without_local_rank(words: list[str], program: str) -> list[str]:
    """Returns a command line without the --local-rank=N (--local_rank=N) that torch.distributed.launch and deepspeed
    add. Ends the process with status 2 if LOCAL_RANK, which they also set, is another."""
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument("--local-rank", "--local_rank", type=int, default=-1)  # as in many scripts
    given, others = parser.parse_known_args(words)
    is_child = "PARTIAL_FC_PARENT" in os.environ  # of --gpus, with the command line of its parent
    if given.local_rank not in (-1, int(os.environ.get("LOCAL_RANK") or 0)) and not is_child:
        parser.error(f"--local-rank {given.local_rank}, but LOCAL_RANK={os.environ.get('LOCAL_RANK', '')}")
    return others


def _no_recipe(name: str, program: str) -> str:
    """Returns the message for a first word that is no recipe."""
    path = Path(name)
    if _is_config(path) or _is_config(path.with_name(f"{path.name}.py")):
        return f"{name} is a configuration file, not a recipe: {program} face --config {name}"
    near = difflib.get_close_matches(name.lower(), recipe_table.RECIPES)
    question = f"; did you mean {near[0]}?" if near else "."
    return f"no recipe {name!r}{question} There are {', '.join(recipe_table.RECIPES)}; or give a file, ./mine.py"


def _is_config(path: Path) -> bool:
    """Tells whether a file fills an EasyDict, as arcface_torch's configurations do."""
    if path.suffix != ".py" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return b"easydict" in file.read(_CONFIG_BYTES)


def usage() -> str:
    lines = [
        textwrap.fill(summary, 80, initial_indent=f"  {name:10} ", subsequent_indent=13 * " ")
        for name, summary in recipe_table.RECIPES.items()
    ]
    return f"{__doc__}\nrecipes:\n" + "\n".join(lines)


def _recipe(name: str) -> Any:
    """Imports a recipe. name: one of ours, or a path that ends with .py."""
    if name.endswith(".py"):
        return import_file(Path(name), Path(name).stem)
    return recipe_table.module(f"{name}.main")
