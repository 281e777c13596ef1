"""`partial-fc checkpoint inspect`: what a checkpoint holds, without loading it."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from safetensors import SafetensorError, safe_open

from partial_fc.checkpoint.folders import MARKER
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.tools.checkpoint_on_disk import has_head, is_step, part_files, steps_below
from partial_fc.checkpoint.tools.stored_rows import gaps
from partial_fc.checkpoint.tools.verify import marked_ranks

_HIGHLIGHTS = (
    *("dataset", "rec", "network", "embedding_size", "image_size", "loss", "scale", "margins", "sample_rate"),
    *("optimizer", "head_optimizer", "lr", "lr_scheduler", "epochs", "max_steps", "batch_size", "accumulate"),
    *(
        "precision",
        "centre_dtype",
        "centre_state_dtype",
        "head_catch_up",
        "gradient_compression",
        "sync_bn",
        "seed",
    ),
)


@dataclass(frozen=True)
class InspectOptions:
    """Shows what a checkpoint holds; of a folder of checkpoints, which there are. Reads no more than it shows:
    `partial-fc checkpoint verify` tells whether the files are whole."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, a folder of checkpoints, or a run's --models-root."""
    json: bool = False
    """As JSON: a list with one object for each checkpoint."""


def inspect(options: InspectOptions) -> int:
    """Prints; returns the exit status: 1 where the one asked for cannot be read."""
    alone = is_step(options.folder)
    folders = [options.folder] if alone else steps_below(options.folder)
    seen = [look(folder) for folder in folders]
    marks = {} if alone else _marks(seen)
    for found in seen:
        found["marks"] = [mark for mark, folder in marks.items() if folder == found["folder"]]
    if options.json:
        print(json.dumps(seen, indent=2, default=str))
    elif alone:
        print("\n".join(_details(seen[0])))
    else:
        print("\n".join(_line(found) for found in seen))
    return int(alone and "problem" in seen[0])


def _marks(seen: list[dict[str, Any]]) -> dict[str, str]:
    """Which folder is the newest, and which has the highest score (checkpoint/folders.py)."""
    good = [found for found in seen if "problem" not in found]
    scored = [found for found in good if isinstance(found.get("score"), int | float)]
    marks = {}
    if good:
        marks["newest"] = max(good, key=lambda found: found["step"])["folder"]
    if scored:
        marks["best"] = max(scored, key=lambda found: (found["score"], found["step"]))["folder"]
    return marks


def look(folder: Path) -> dict[str, Any]:
    """What there is to say of one folder, as JSON. "problem": why no more can be said."""
    marker = folder / MARKER
    found: dict[str, Any] = {
        "folder": str(folder),
        "complete": marker.exists(),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
    if not marker.exists():
        return {
            **found,
            "problem": f"incomplete: it has no file {MARKER}; it is still being written, or given up",
        }
    found["age_s"] = round(time.time() - marker.stat().st_mtime)
    try:
        checkpoint = Checkpoint(folder)
        manifest = checkpoint.manifest
        found |= {
            key: manifest[key]
            for key in ("format", "step", "position", "world_size", "score", "best", "history", "versions")
            if key in manifest
        }
        found["ranks_here"] = marked_ranks(folder, manifest)
        found["configuration"] = manifest.get("configuration", {})
        if not isinstance(found["configuration"], dict):
            raise ValueError(f"{folder}: manifest.json says configuration is {found['configuration']!r}")
        names = checkpoint.class_names
        found["class_names"] = len(names) if names is not None else None
        found["backbone"] = _tensors(folder / "backbone.safetensors")
        found["optimizer"] = _tensors(folder / "optimizer.safetensors")
        if has_head(manifest, str(folder)):
            found["head"] = _head(folder, manifest)
    except (ValueError, OSError) as error:
        found["problem"] = str(error)
    return found


def _tensors(path: Path) -> dict[str, Any]:
    """Counts of a file, from its header."""
    try:
        with safe_open(path, framework="pt") as file:
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error
    numbers = 0
    for part in parts:
        count = 1
        for size in part.get_shape():
            count *= size
        numbers += count
    dtypes = sorted({part.get_dtype() for part in parts})
    return {"tensors": len(parts), "numbers": numbers, "dtypes": dtypes, "bytes": path.stat().st_size}


def _head(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    files = sorted(part_files(folder, manifest["world_size"]), key=lambda file: file.start)
    made = sum(file.num_rows for file in files)
    for file in files:
        problem = file.problem()
        if problem:
            raise ValueError(f"{file.path}: {problem}")
    moved = [file.tensors["touched"] > 0 for file in files if "touched" in file.tensors]
    touched = sum(int(rows.flatten(1).any(dim=1).sum()) if rows.dim() > 1 else int(rows.sum()) for rows in moved)
    facts = manifest["head"]
    found = {key: manifest.get(key) for key in ("num_classes", "embedding_size", "sub_centres", "hard_negatives")} | {
        "classes_made": made,
        "classes_touched": touched,
        "columns": {
            name: {"shape": column.shape, "dtype": str(column.dtype).removeprefix("torch.")}
            for name, column in (files[0].columns if files else {}).items()
        },
        "num_steps": facts["num_steps"],
        "row_seed": facts["row_seed"],
        "margin": facts["margin"],
        "files": len(files),
        "bytes": sum(file.path.stat().st_size for file in files),
    }
    if len(marked_ranks(folder, manifest)) == manifest["world_size"]:
        for problem in gaps(files, manifest["num_classes"]):
            found["problem"] = problem
    return found


def _line(found: dict[str, Any]) -> str:
    """One of several."""
    name = Path(found["folder"]).name
    if "problem" in found:
        return f"{name}  {_bytes(found['bytes']):>9}  {found['problem']}"
    head = found.get("head")
    words = [
        f"{name}  {_bytes(found['bytes']):>9}  {_age(found['age_s']):>8} old  {found['world_size']} rank(s)",
        f"{head['num_classes']} classes" if head else "",
        f"score {found['score']:.5f}" if isinstance(found.get("score"), int | float) else "",
        *found["marks"],
    ]
    return "  ".join(word for word in words if word)


def _details(found: dict[str, Any]) -> list[str]:
    """One, line by line."""
    lines = [("folder", found["folder"])]
    if "problem" in found:
        lines.append(("problem", found["problem"]))
    else:
        lines += _facts(found)
    return [f"{name:14}{value}" for name, value in lines if value]


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    size, here = found["world_size"], found["ranks_here"]
    lines = [
        ("step", f"{found['step']}, after {found.get('position', '?')} samples"),
        ("written", f"{_age(found['age_s'])} ago by {size} rank(s), format {found['format']}"),
        ("size", _bytes(found["bytes"])),
        (
            "holds",
            f"the files of ranks {', '.join(map(str, here)) or 'none'} only" if len(here) < size else "",
        ),
        ("backbone", _counts(found["backbone"])),
        ("optimizer", _counts(found["optimizer"])),
    ]
    if "head" in found:
        lines += _head_lines(found["head"], found["class_names"])
    return [
        *lines,
        ("best", _pairs(found.get("best"))),
        ("score", str(found["score"]) if found.get("score") is not None else ""),
        ("trained with", _pairs({key: found["configuration"].get(key) for key in _HIGHLIGHTS})),
        ("versions", _pairs(found.get("versions"))),
        *(("history", str(line)) for line in found.get("history", ())),
    ]


def _pairs(values: Any) -> str:
    """Recipe mnist has one number where face has several by name."""
    if isinstance(values, dict):
        return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    return str(values or "")


def _head_lines(head: dict[str, Any], num_names: int | None) -> list[tuple[str, str]]:
    classes, made, touched = head["num_classes"], head["classes_made"], head["classes_touched"]
    subs = f", {head['sub_centres']} centres each" if head["sub_centres"] > 1 else ""
    columns = ", ".join(f"{name} {column['dtype']}" for name, column in head["columns"].items())
    lines = [
        (
            "classes",
            f"{classes} of {head['embedding_size']} features{subs}, {'with' if num_names else 'no'} names",
        ),
        (
            "rows",
            f"{made} made, of which {made - touched} were never touched; {classes - made} not made yet",
        ),
        ("", f"{columns}; {head['files']} file(s), {_bytes(head['bytes'])}"),
        ("head", f"{head['num_steps']} steps, row seed {head['row_seed']}"),
    ]
    if head["margin"]:
        lines.append(("margin", json.dumps(head["margin"])))
    if "problem" in head:
        lines.append(("problem", head["problem"]))
    return [(name or " ", value) for name, value in lines]


def _counts(tensors: dict[str, Any]) -> str:
    kinds = f" {' '.join(tensors['dtypes'])}" if tensors["dtypes"] else ""
    return f"{tensors['numbers']:,} numbers in {tensors['tensors']} tensors{kinds}, {_bytes(tensors['bytes'])}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
