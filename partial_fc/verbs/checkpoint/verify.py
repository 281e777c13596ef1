"""`partial-fc checkpoint verify`: checks that all files exist and are unchanged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from partial_fc import terminal
from partial_fc.checkpoint.files import checksums_name, load_tensors
from partial_fc.checkpoint.folders import MARKER, is_quarantined, is_step, steps_below
from partial_fc.files import TEXT_BYTES, read_bytes

if TYPE_CHECKING:
    from partial_fc.checkpoint.read import Checkpoint
    from partial_fc.checkpoint.rows import Part


@dataclass(frozen=True)
class VerifyOptions:
    """Checks a checkpoint: every file is present and matches its checksum, every class is stored once, shapes and
    dtypes agree. Exit status 1 if there is a problem; each problem names its file."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """One checkpoint, or its folders if each host has its own; or a folder of checkpoints, which are all checked."""
    finite: bool = False
    """Also check all tensors for NaN and Inf."""


def verify(options: VerifyOptions) -> int:
    """Prints the findings; returns the exit status."""
    alone = len(options.folders) > 1 or is_step(options.folders[0])
    if alone:
        groups: list[Sequence[Path]] = [options.folders]
    else:
        groups = [(folder,) for folder in steps_below(options.folders[0])]
    num_bad = num_checked = 0
    for group in groups:
        where = ", ".join(map(str, group))
        if len(groups) > 1 and is_quarantined(group[0]):
            print(f"{where}: quarantined, not checked")
            continue
        num_problems = 0
        try:
            found = list(findings(group, options.finite))
        except FileNotFoundError as error:
            found = [("bad", f"{error.filename} is missing")]
        if not alone and not (group[0] / MARKER).exists():  # a run writes it last, and removes it first
            print(f"{where}: incomplete (being written, abandoned, or removed meanwhile), not checked")
            continue
        num_checked += 1
        for kind, text in found:
            print(f"{kind}: {text}")
            num_problems += kind == "bad"
        print(f"{where}: {f'{num_problems} problem(s)' if num_problems else 'ok'}")
        num_bad += num_problems > 0
    return int(num_bad > 0 or not num_checked)


def findings(folders: Sequence[Path], finite: bool) -> Iterator[tuple[str, str]]:
    """Yields ("bad" or "note", what) for the folders of one checkpoint."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.read import Checkpoint

    try:
        checkpoint = Checkpoint(*folders)
        tables = tables_in(checkpoint.manifest, str(folders[0]))
    except (ValueError, OSError) as error:  # nothing else can be checked then
        yield "bad", str(error)
        return
    size, ranks = checkpoint.world_size, checkpoint.ranks
    yield from _check_checksums(checkpoint, ranks)
    if len(ranks) < size:
        yield ("note", f"these folders hold the files of ranks {sorted(ranks)} of {size}: the others' were not checked")
    for name, facts in tables.items():
        yield from _check_table(checkpoint, ranks, name, facts)
    yield from _check_class_names(checkpoint, [facts["num_classes"] for facts in tables.values()])
    if finite:
        yield from _check_finite(folders)


def _check_checksums(checkpoint: "Checkpoint", ranks: set[int]) -> Iterator[tuple[str, str]]:
    """Compares every rank's files with their checksums."""
    listed = checkpoint.checksums
    names_here = {path.name for folder in checkpoint.folders for path in folder.iterdir()}
    for name in (checksums_name(rank, checkpoint.world_size) for rank in sorted(ranks)):
        if name not in names_here:
            yield "bad", f"{checkpoint.where}: {name} is missing"
    for path in (path for folder in checkpoint.folders for path in sorted(folder.iterdir())):
        if path not in listed and path.name != MARKER and path.suffix != ".sha256":
            # Loading finds head files by name.
            kind = "bad" if path.name.startswith("head-") and not path.name.endswith(".partial") else "note"
            yield kind, f"{path} is in no list of checksums: it does not belong to this checkpoint"
    num_bytes = sum(path.stat().st_size for path in listed if path.exists())
    with terminal.bar(total=num_bytes, unit="B", unit_scale=True, desc="checksums", leave=False) as bar:
        for path in listed:
            try:
                checkpoint.check(path)
                bar.update(path.stat().st_size)
            except ValueError as error:
                yield "bad", str(error)


def _check_class_names(checkpoint: "Checkpoint", counts: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Checks the class names. counts: the classes of each table, of which one has the names, or all together."""
    names = checkpoint.folder / "class-names.txt"
    if counts and names.exists():
        num_names = read_bytes(names, TEXT_BYTES).count(b"\n")
        if num_names not in (*counts, sum(counts)):
            yield "bad", f"{names} has {num_names} names for {' or '.join(map(str, counts))} classes"


def _check_table(
    checkpoint: "Checkpoint", ranks: set[int], table: str, facts: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Checks class ranges, shapes, dtypes, and update counts of rows. facts: the manifest's entry of the table."""
    from partial_fc.checkpoint.rows import gaps, mismatch, part_files
    from partial_fc.head.shard import Shard

    size = checkpoint.world_size
    files = part_files(checkpoint.folders, size, table)
    for rank in sorted(ranks):
        shard = Shard.of(facts["num_classes"], rank, size)
        files_of_rank = [file for file in files if file.rank == rank]
        for gap in gaps(files_of_rank, shard.start, shard.stop, shard.stop):
            yield "bad", f"rank {rank} in {checkpoint.where}{f', table {table}' if table else ''}: {gap}"
    first: tuple[Part, str] | None = None
    for file in terminal.bar(files, desc="head", unit="file", leave=False):
        try:
            part = file.open()
        except (ValueError, OSError) as error:
            yield "bad", str(error)
            continue
        problem = _against_manifest(part, facts)
        problem = problem or (mismatch(first[0].columns, part.columns, first[1]) if first else None)
        if problem:
            yield "bad", f"{file.path}: {problem}"
        else:
            first = first or (part, file.path.name)


def _against_manifest(part: "Part", manifest: Mapping[str, Any]) -> str | None:
    """Returns how a file differs from the manifest, or None."""
    width, subs = manifest["embedding_size"], manifest["sub_centres"]
    shape = (width,) if subs == 1 else (subs, width)
    actual = part.columns["centres"].shape
    if actual != shape:
        return f"centres have shape {actual} a class; the manifest says {shape}"
    touched = part.tensors.get("touched")
    num_steps = manifest["head"]["num_steps"]
    if touched is not None and touched.numel():
        low, high = touched.min().item(), touched.max().item()
        if low < 0 or high > num_steps:
            return f"rows were touched in steps {low} to {high}; the head has made {num_steps}"
    return None


def _check_finite(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    import torch

    paths = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    for path in terminal.bar(paths, desc="finite", unit="file", leave=False):
        try:
            tensors = load_tensors(path)
        except (ValueError, OSError) as error:
            yield "bad", str(error)
            continue
        for name, t in tensors.items():
            num_bad = int((~torch.isfinite(t)).sum())
            if num_bad:
                yield "bad", f"{path}: {name} has {num_bad} of {t.numel()} numbers that are NaN or Inf"
