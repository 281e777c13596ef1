"""Where a run writes: what its folder is called where nobody says so, and that no other run writes there."""

import dataclasses
import re
import secrets
from pathlib import Path
from typing import Any

from partial_fc.checkpoint.owner import take
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.checkpoint.peer.transfer import all_gather_json
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World, elastic
from partial_fc.flags import RunFlags


def is_asked_for(config: Any) -> bool:
    """Whether the user has said where to write, or when (in a configuration file, too): what comes of a run on images
    that are made up is then kept, too. Ranks that come and go always need it."""
    default = _default(config)
    return elastic.active() or any(
        getattr(config.run, name) != getattr(default, name)
        for name in ("models_root", "checkpoint_dir", "checkpoint_every")
    )


def named(config: Any, data: str | Path, network: str) -> Any:
    """The configuration with a --models-root that is this run's: in a recipe's own, DATA and NETWORK stand for what is
    trained on and for what is trained."""
    default = _default(config).models_root
    if config.run.models_root != default:
        return config
    words = {"DATA": _word(data), "NETWORK": _word(network)}
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


def hold(config: Any, world: World, memory: Memory) -> list[str]:
    """Makes the folders of a run this run's, until `let_go`. In a later world of the run they stay its own. Returns
    notes for the user. Raises ValueError, on all ranks, where another run writes there. A collective."""
    ids_W = all_gather_json([memory.run, secrets.token_hex(8)], world, "run/id")
    memory.run = next((run for run, _ in ids_W if run), ids_W[0][1])
    notes = []
    for root in dict.fromkeys((config.run.models_root, config.run.checkpoints)):
        leads = ranks_beside(root, world)[0] == world.rank
        before = memory.owners.pop(root, None)
        if before:
            before.stop()
        problem, note = "", ""
        try:
            if leads:
                memory.owners[root], note = take(root, memory.run)
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            problem = f"rank {world.rank} cannot write to {root}: {error}"
        found_W = all_gather_json([problem, note], world, "run/owner")
        if problems := [problem for problem, _ in found_W if problem]:
            raise ValueError(problems[0])
        notes += [note for _, note in found_W if note]
    return notes


def let_go(memory: Memory) -> None:
    """The run has ended; its folders are free."""
    for owner in memory.owners.values():
        owner.release()
    memory.owners.clear()
