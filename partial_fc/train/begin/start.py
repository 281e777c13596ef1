"""The start of a run before torch is imported, which takes seconds: its folders and the processes of --gpus."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from partial_fc.comm.launch import start
from partial_fc.flags import LaunchFlags, RunFlags


def launch(
    config: Any, called: tuple[str | Path, str] | None = None, first: Callable[[LaunchFlags], int | None] | None = None
) -> int | None:
    """Starts this host's processes if asked; returns the exit status, None in a process that trains. first: see
    `comm.launch.start`."""
    config = named(config, called)
    if "PARTIAL_FC_WHERE" in os.environ:  # for run.sh
        print(config.run.checkpoints)
        return 0
    return start.start(config.launch, first)


def roots(config: Any) -> list[Path]:
    """Returns the folders that are the run's own."""
    return list(dict.fromkeys((config.run.models_root, config.run.checkpoints)))


def is_asked_for(config: Any) -> bool:
    """Returns whether the user has said where or when to write: then synthetic results are kept, too."""
    default = _default(config)
    return any(
        getattr(config.run, name) != getattr(default, name)
        for name in ("models_root", "checkpoint_dir", "checkpoint_every")
    )


def named(config: Any, called: tuple[str | Path, str] | None) -> Any:
    """Returns the configuration with --models-root named: `called` replaces DATA and NETWORK in a default."""
    default = _default(config).models_root
    if called is None or config.run.models_root != default:
        return config
    words = dict(zip(("DATA", "NETWORK"), map(_word, called), strict=True))
    root = Path(re.sub("DATA|NETWORK", lambda found: words[found[0]], str(default)))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, models_root=root))


def _default(config: Any) -> RunFlags:
    """Returns the recipe's defaults."""
    return next(field.default for field in dataclasses.fields(config) if field.name == "run")  # type: ignore[return-value]


def _word(text: str | Path) -> str:
    """Returns the name of a data set: of a path, its file or folder."""
    path = Path(text)
    if path.name in ("train.rec", "", ".", ".."):
        path = path.resolve()
        path = path.parent if path.name == "train.rec" else path
    name = path.stem if path.suffix in (".rec", ".lst", ".txt", ".csv", ".tsv", ".py") else path.name
    return re.sub(r"[^\w.+-]+", "_", name) or "data"
