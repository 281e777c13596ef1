"""The table of recipes: what the core knows of them, by name. Only here and in their own folders are they named.

A recipe owns its system: flags, readers, commands. recipes/NAME/main.py has its function main(flags). Modules are
imported when they are used, so that help takes no seconds.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

RECIPES = {
    "face": "Face recognition, and every other task with very many classes: a backbone, Partial FC, verification.",
    "imagenet": (
        "ImageNet classification from the image databases of Caffe and Caffe2, on their command line: "
        "a ResNet, cross-entropy."
    ),
    "kinetics": "Video classification on Kinetics' lists, on GluonCV's command line: SlowFast networks, cross-entropy.",
    "mnist": (
        "The PyTorch tutorial's job: a small ConvNet on MNIST's files, data parallel, in mixed precision if wanted."
    ),
}
"""Name -> its line of help."""

VERBS = {
    "Train": {"launch": ("mxnet.launch.command:launch", "start a command on several hosts, over ssh for example")},
    "Use a model": {"convert": ("mxnet.convert:convert", "convert weights to or from MXNet or arcface_torch")},
    "Data": {
        "data lmdb": ("imagenet.make_database:make_lmdb", "write images as an LMDB, for recipe imagenet"),
        "data kinetics": ("kinetics.make_lists:make_lists", "check a folder of videos and list them"),
    },
}
"""Section of the help -> command -> (its function, its line of help)."""

OPEN_DATABASE = "imagenet.databases:open_database"
"""What opens an LMDB or LevelDB of images as a source."""
PACKAGES = ("mxnet",)
"""Packages that a recipe computes with, for `doctor env`."""
SERVE = {"DMLC_ROLE": ("mxnet.library", ("server", "scheduler"))}
"""Variables of processes with the workers' command line that serve them instead, without torch -> (the module that does
so when it is imported and then ends the process, the values)."""

_PACKAGE = Path(__file__).parent


def module(name: str) -> Any:
    """Imports a module of recipes/, such as "face.main": from within the package where it is installed, else from the
    checkout."""
    if (_PACKAGE / "recipes").is_dir():
        return importlib.import_module(f"partial_fc.recipes.{name}")
    if str(_PACKAGE.parent) not in sys.path:
        sys.path.insert(0, str(_PACKAGE.parent))
    return importlib.import_module(f"recipes.{name}")


def load(where: str) -> Any:
    """Imports what "module:name" says."""
    name, _, attribute = where.partition(":")
    return getattr(module(name), attribute)
