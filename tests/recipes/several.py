"""Runs recipe `face` several times in one launch: `python -m tests.recipes.several "FLAGS" "FLAGS" ...`, with or
without a launcher before it. Starting processes takes longer than training a few steps."""

import shlex
import sys

from partial_fc import comm
from partial_fc.train_command import exit_now
from recipes import face


def main(runs: list[str]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    for flags in runs:
        face.main(shlex.split(flags))
    end()


if __name__ == "__main__":
    main(sys.argv[1:])
    exit_now(0)
