"""`partial-fc checkpoint inspect`: prints a checkpoint's contents without loading it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tqdm import tqdm

from partial_fc.checkpoint.folders import MARKER, best, is_quarantined, is_step, newest, steps_below

if TYPE_CHECKING:
    from partial_fc.checkpoint.read import Checkpoint

# Of the manifest, and of the flags in it.
_SHOWN = ("format", "step", "position", "world_size", "score", "best", "history", "versions")
_FLAGS = (
    *("dataset", "rec", "network", "embedding_size", "image_size", "loss", "scale", "margins", "sample_rate"),
    *("optimizer", "head_optimizer", "lr", "lr_scheduler", "epochs", "max_steps", "batch_size", "accumulate"),
    *("precision", "centre_dtype", "centre_state_dtype", "head_catch_up", "gradient_compression", "sync_bn", "seed"),
)


@dataclass(frozen=True)
class InspectOptions:
    """Shows the contents of a checkpoint, or lists the checkpoints of a folder. Reads only what it shows: `partial-fc
    checkpoint verify` checks the files."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, a folder of checkpoints, or a run's --models-root."""


def inspect(options: InspectOptions) -> int:
    """Prints the contents; returns the exit status: 1 if the given checkpoint is unreadable."""
    if is_step(options.folder):
        facts = summary(options.folder)
        for name, value in facts.items():
            for text in map(_words, value if name == "history" else [value]):
                if text:
                    print(f"{name:22}{text}")
        return int("problem" in facts)
    folders = steps_below(options.folder)
    marks = {"newest": newest(folders[0].parent), "best": best(folders[0].parent)}
    for folder in folders:
        print("  ".join([folder.name, *_line(summary(folder)), *(mark for mark in marks if marks[mark] == folder)]))
    return 0


def summary(folder: Path) -> dict[str, Any]:
    """Describes one folder, by name. "problem": why it is no checkpoint."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.read import Checkpoint

    facts: dict[str, Any] = {"folder": str(folder)}
    marker = folder / MARKER
    gone = f"incomplete: it has no file {MARKER}; it is being written, was abandoned, or removed meanwhile"
    if not marker.exists():
        return facts | {"problem": gone}
    if is_quarantined(folder):
        return facts | {"problem": "quarantined by a run that resumed from an older one; remove it if it is not needed"}
    try:
        facts["bytes"] = _bytes(sum(path.stat().st_size for path in folder.iterdir()))
        facts["age"] = str(timedelta(seconds=round(time.time() - marker.stat().st_mtime)))
        checkpoint = Checkpoint(folder)
        manifest, names = checkpoint.manifest, checkpoint.class_names
        facts |= {key: manifest[key] for key in _SHOWN if key in manifest}
        facts["ranks_here"] = sorted(checkpoint.ranks)
        facts["configuration"] = {key: manifest.get("configuration", {}).get(key) for key in _FLAGS}
        facts["class_names"] = None if names is None else len(names)
        for name, said in tables_in(manifest, str(folder)).items():
            prefix = f"head.{name}." if name else "head."
            facts |= {prefix + key: value for key, value in _table(checkpoint, name, said)}
    except (ValueError, OSError) as error:
        facts["problem"] = str(error) if marker.exists() else gone
    return facts


def _table(checkpoint: "Checkpoint", name: str, said: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the facts of a table's files. said: the table's entry in the manifest."""
    from partial_fc.checkpoint.rows import part_files

    yield from ((key, said[key]) for key in ("num_classes", "embedding_size", "sub_centres", "hard_negatives"))
    files = part_files(checkpoint.folders, checkpoint.world_size, name)
    parts = [file.open() for file in files]
    yield "classes_created", sum(part.num_rows for part in parts)
    steps = [part.rows["touched"].unsqueeze(-1).flatten(1) for part in parts if "touched" in part.rows]
    yield "classes_touched", sum(int((step_N1 > 0).any(dim=1).sum()) for step_N1 in steps)
    columns = parts[0].columns if parts else {}
    yield "columns", {key: f"{tuple(c.shape)} {str(c.dtype).removeprefix('torch.')}" for key, c in columns.items()}
    yield from ((key, said["head"][key]) for key in ("num_steps", "row_seed", "margin"))
    yield "bytes", _bytes(sum(file.path.stat().st_size for file in files))


def _line(facts: dict[str, Any]) -> Iterator[str]:
    """Describes one of several checkpoints."""
    if "problem" in facts:
        yield facts["problem"]
        return
    yield from (f"{facts['bytes']:>9}", f"{facts['age']:>8} old", f"{facts['world_size']} rank(s)")
    for key, value in facts.items():
        if key.endswith("num_classes"):
            yield f"{key.removeprefix('head.').removesuffix('num_classes').replace('.', ': ')}{value} classes"
    if isinstance(facts.get("score"), int | float):
        yield f"score {facts['score']:.5f}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _bytes(number: float) -> str:
    return tqdm.format_sizeof(number, "B")
