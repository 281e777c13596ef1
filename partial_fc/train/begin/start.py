"""What needs no torch, and so comes before it is imported, which takes seconds: where a run writes, whether another run
does, and the processes of --gpus."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from partial_fc import comm
from partial_fc.checkpoint.lock import check_free
from partial_fc.comm import elastic
from partial_fc.comm.launch import start
from partial_fc.flags import RunFlags


def launch(config: Any, called: tuple[str | Path, str] | None = None) -> int | None:
    """Starts the processes of this host where the flags ask for them. Returns the exit status to end with; none: this
    process is itself one of those that train. called: see `named`. Raises ValueError where another run is seen to write
    to this one's folders."""
    config = named(config, called)
    if "PARTIAL_FC_WHERE" in os.environ:  # run.sh asks
        print(config.run.checkpoints)
        return 0
    # Once per host. Where ranks come and go, the run that is there may be the one that this process is to join.
    if not (elastic.active() or comm.started_here()) and comm.detect().local_rank == 0:
        check_free(roots(config))
    return start.start(config.launch, getattr(config, "rendezvous", None))


def roots(config: Any) -> list[Path]:
    """The folders that are the run's own."""
    return list(dict.fromkeys((config.run.models_root, config.run.checkpoints)))


def is_asked_for(config: Any) -> bool:
    """Whether the user has said where to write, or when (in a configuration file, too): what comes of a run on images
    that are made up is then kept, too. Ranks that come and go always need it."""
    default = _default(config)
    return elastic.active() or any(
        getattr(config.run, name) != getattr(default, name)
        for name in ("models_root", "checkpoint_dir", "checkpoint_every")
    )


def named(config: Any, called: tuple[str | Path, str] | None) -> Any:
    """The configuration with a --models-root that is this run's: in a recipe's own, DATA and NETWORK stand for what is
    trained on and for what is trained, which is what it is called by."""
    default = _default(config).models_root
    if called is None or config.run.models_root != default:
        return config
    words = dict(zip(("DATA", "NETWORK"), map(_word, called), strict=True))
    root = Path(re.sub("DATA|NETWORK", lambda found: words[found[0]], str(default)))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, models_root=root))


def _default(config: Any) -> RunFlags:
    """The recipe's own values."""
    return next(field.default for field in dataclasses.fields(config) if field.name == "run")  # type: ignore[return-value]


def _word(text: str | Path) -> str:
    """The name of a data set: where it is a path, that of its folder or file."""
    path = Path(text)
    if path.name in ("train.rec", "", ".", ".."):
        path = path.resolve()
        path = path.parent if path.name == "train.rec" else path
    name = path.stem if path.suffix in (".rec", ".lst", ".txt", ".csv", ".tsv", ".py") else path.name
    return re.sub(r"[^\w.+-]+", "_", name) or "data"
