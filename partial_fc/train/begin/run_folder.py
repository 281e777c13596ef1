"""Where a run writes: what its folder is called where nobody says so, and that no other run writes there."""

import dataclasses
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from partial_fc.checkpoint.owner import take
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.checkpoint.peer.transfer import all_gather_json
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World, elastic
from partial_fc.errors import describe
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
    roots = list(dict.fromkeys((config.run.models_root, config.run.checkpoints)))
    mine = [root for root in roots if ranks_beside(root, world)[0] == world.rank]
    for owner in memory.owners.values():  # of the world before
        owner.stop()
    memory.owners.clear()
    problems, notes = [], []
    with ThreadPoolExecutor() as pool:  # at once: each may have to wait until it is sure that another run is gone
        taken = {root: pool.submit(take, root, memory.run) for root in mine}
    for root, future in taken.items():
        try:
            memory.owners[root], note = future.result()
            notes += [note] if note else []
        except ValueError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"rank {world.rank} cannot write to {root}: {describe(error)}")
    found_W = all_gather_json([problems, notes], world, "run/owner")
    for problems, _ in found_W:
        if problems:
            raise ValueError(problems[0])
    return [note for _, notes in found_W for note in notes]


def let_go(memory: Memory) -> None:
    """The run has ended; its folders are free."""
    for owner in memory.owners.values():
        owner.release()
    memory.owners.clear()
