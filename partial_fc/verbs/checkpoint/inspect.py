"""`partial-fc checkpoint inspect`: prints a checkpoint's contents without loading it."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tqdm import tqdm

from partial_fc.checkpoint.folders import MARKER, best, is_quarantined, is_step, newest, steps_below

if TYPE_CHECKING:
    from partial_fc.checkpoint.read import Checkpoint

_HIGHLIGHTS = (
    *("dataset", "rec", "network", "embedding_size", "image_size", "loss", "scale", "margins"),
    *("sample_rate",),
    *("optimizer", "head_optimizer", "lr", "lr_scheduler", "epochs", "max_steps", "batch_size", "accumulate"),
    *("precision", "centre_dtype", "centre_state_dtype", "head_catch_up", "gradient_compression", "sync_bn", "seed"),
)
_GONE = "removed meanwhile"


@dataclass(frozen=True)
class InspectOptions:
    """Shows the contents of a checkpoint, or lists the checkpoints of a folder. Reads only what it shows: `partial-fc
    checkpoint verify` checks the files."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, a folder of checkpoints, or a run's --models-root."""


def inspect(options: InspectOptions) -> int:
    """Prints the contents; returns the exit status: 1 if the given checkpoint is unreadable."""
    alone = is_step(options.folder)
    folders = [options.folder] if alone else steps_below(options.folder)
    marks = {} if alone else {"newest": newest(folders[0].parent), "best": best(folders[0].parent)}
    summaries = [
        summary(folder) | {"marks": [mark for mark, marked in marks.items() if marked == folder]} for folder in folders
    ]
    if alone:
        facts = summaries[0]
        shown = ("folder", "problem") if "problem" in facts else facts.keys()
        for name, value in _lines({key: facts[key] for key in shown}):
            if value:
                print(f"{name:22}{value}")
    else:
        for each in summaries:
            print(_line(each))
    return int(alone and "problem" in summaries[0])


def summary(folder: Path) -> dict[str, Any]:
    """Describes one folder. "problem": why it is incomplete."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.read import Checkpoint

    marker = folder / MARKER
    facts: dict[str, Any] = {"folder": str(folder), "complete": marker.exists(), "bytes": 0}
    try:
        facts["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:  # a run removes its older ones
        return facts | {"complete": False, "problem": _GONE}
    if not facts["complete"]:
        facts["problem"] = f"incomplete: it has no file {MARKER}; it is being written, or was abandoned"
        return facts
    if is_quarantined(folder):
        facts["problem"] = "quarantined by a run that resumed from an older one; remove it if it is not needed"
        return facts
    try:
        facts["age_s"] = round(time.time() - marker.stat().st_mtime)
        checkpoint = Checkpoint(folder)
        manifest = checkpoint.manifest
        shown = ("format", "step", "position", "world_size", "score", "best", "history", "versions")
        facts |= {key: manifest[key] for key in shown if key in manifest}
        facts["ranks_here"] = sorted(checkpoint.ranks)
        facts["configuration"] = manifest.get("configuration", {})
        if not isinstance(facts["configuration"], dict):
            raise ValueError(f"{folder}: manifest.json says configuration is {facts['configuration']!r}")
        names = checkpoint.class_names
        facts["class_names"] = len(names) if names is not None else None
        tables = {name: _table(checkpoint, name, said) for name, said in tables_in(manifest, str(folder)).items()}
        if tables:
            facts["head"] = tables[""] if [*tables] == [""] else tables
    except (ValueError, OSError) as error:
        facts["problem"] = str(error) if marker.exists() else _GONE
    return facts


def _table(checkpoint: "Checkpoint", name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a table's files. manifest: the table's entry."""
    from partial_fc.checkpoint.rows import gaps, part_files

    files = part_files(checkpoint.folders, checkpoint.world_size, name)
    columns: dict[str, Any] = {}
    num_created = num_touched = 0
    for file in files:
        part = file.open()
        columns = columns or {
            key: {"shape": column.shape, "dtype": str(column.dtype).removeprefix("torch.")}
            for key, column in part.columns.items()
        }
        num_created += part.num_rows
        if "touched" in part.rows:
            num_touched += int((part.rows["touched"] > 0).unsqueeze(-1).flatten(1).any(dim=1).sum())
    facts = {key: manifest[key] for key in ("num_classes", "embedding_size", "sub_centres", "hard_negatives")}
    facts |= {"classes_created": num_created, "classes_touched": num_touched, "columns": columns}
    facts |= {key: manifest["head"][key] for key in ("num_steps", "row_seed", "margin")}
    facts |= {"files": len(files), "bytes": sum(file.path.stat().st_size for file in files)}
    if len(checkpoint.ranks) == checkpoint.world_size:
        num_classes = manifest["num_classes"]
        for problem in gaps(files, 0, num_classes, num_classes):
            facts["problem"] = problem
    return facts


def _line(facts: dict[str, Any]) -> str:
    """Describes one of several checkpoints in a line."""
    words = [Path(facts["folder"]).name, f"{_bytes(facts['bytes']):>9}"]
    if "problem" in facts:
        return "  ".join((*words, facts["problem"], *facts["marks"]))
    words += [f"{_age(facts['age_s']):>8} old", f"{facts['world_size']} rank(s)"]
    head = facts.get("head", {})
    words += [f"{f'{name}: ' if name else ''}{table['num_classes']} classes" for name, table in _tables(head).items()]
    words += [f"score {facts['score']:.5f}"] if isinstance(facts.get("score"), int | float) else []
    return "  ".join((*words, *facts["marks"]))


def _lines(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields one checkpoint as lines of (name, value)."""
    if not name or (isinstance(values, dict) and (name == "head" or "num_classes" in values)):
        for key, value in values.items():
            yield from _lines(value, f"{name}.{key}" if name else key)
    elif name == "history":
        yield from ((name, str(line)) for line in values)
    elif name == "configuration":
        yield name, _words({key: values.get(key) for key in _HIGHLIGHTS})
    elif name == "age_s":
        yield "age", _age(values)
    else:
        yield name, _bytes(values) if name.endswith("bytes") else _words(values)


def _tables(head: dict[str, Any]) -> dict[str, Any]:
    """A summary's tables by name."""
    return {"": head} if "num_classes" in head else head


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _bytes(number: float) -> str:
    return tqdm.format_sizeof(number, "B")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
