"""Trains a recipe: `python train.py RECIPE --help` lists its flags. The same as `partial-fc train RECIPE`."""

import sys

from partial_fc.verbs.train import run_and_exit

if __name__ == "__main__":
    run_and_exit(sys.argv[1:], "train.py")
