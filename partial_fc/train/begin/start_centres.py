"""The class centres that a fresh run starts from, by --start-centres:

imprint         the mean of each class's embeddings, by the backbone as it starts (imprint.py)
FILE.npy        a matrix, a row for each class
FILE or DIR     the centre files of arcface_torch or InsightFace's trainer of 2020, one for each of its ranks
DIR             a checkpoint, or a run, of which the newest counts

Each rank reads the rows of its own classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from partial_fc.checkpoint.class_names import check_class_names
from partial_fc.checkpoint.consistency import open_centres
from partial_fc.checkpoint.rows_now import load_centres
from partial_fc.comm import all_or_raise
from partial_fc.data import Source
from partial_fc.data.npy import read_npy
from partial_fc.flags import HeadFlags
from partial_fc.foreign.centre_files import ForeignRows, are_in, find
from partial_fc.head import Head, PartialFC, Table
from partial_fc.head.rows import RowSGD
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.begin.imprint import imprint
from partial_fc.train.context import Context

_CHUNK = 1 << 22  # numbers that are read at a time
_EXPECTED = "expected imprint, FILE.npy, a run, a checkpoint, or centre files of arcface_torch or InsightFace"


def load(
    run: Context, tables: Sequence[tuple[HeadFlags, PartialFC]], backbone: TorchBackbone, head: Head, source: Source
) -> None:
    """Writes the centres that the flags ask for into the head, or into each of several. tables: of the head, with their
    flags. A collective. Raises ValueError, on all ranks."""
    given = [(flags.start_centres, table) for flags, table in tables if flags.start_centres is not None]
    paths = {path for path, _ in given if path != "imprint" and not path.endswith(".npy")}
    folders = {path for path in paths if Path(path).is_dir() and not are_in(Path(path))}
    if not folders:
        for path, table in given:
            _load_table(run, backbone, source, path, table, getattr(head, "first_class", {}).get(table.name, 0))
        return
    if {path for path, _ in given} != folders or len(folders) > 1 or len(given) < len(head.tables()):
        raise ValueError(
            f"--start-centres {' '.join(sorted(folders))}: a checkpoint has the centres of all heads; give one to all "
            "of them, and to a single head FILE.npy or imprint"
        )
    stored = open_centres(Path(folders.pop()), run.world)
    of_face = stored.manifest.get("recipe") == run.recipe
    for note in check_class_names(stored, source) if of_face else ():
        run.note(note)
    load_centres(stored, head)
    run.logger.info(f"class centres from {stored.folder}")


def _load_table(
    run: Context, backbone: TorchBackbone, source: Source, given: str, table: PartialFC, first_class: int
) -> None:
    """given: by the flag. first_class: the number that the source gives to the table's first class."""
    path = Path(given)
    if given == "imprint":
        imprint(backbone, table, source, run.logger, first_class)
        return

    def read() -> None:
        if not path.exists():
            raise ValueError(f"not found; {_EXPECTED}")
        _write(table, _npy(path, table) if path.suffix == ".npy" else _foreign(path, table))

    of_head = f"{table.name}=" if table.name else ""
    all_or_raise(read, run.world, "start/centres", f": --start-centres {of_head}{path}")
    run.logger.info(f"class centres {f'of {table.name} ' if table.name else ''}from {path}")


Read = Callable[[range], Tensor]  # classes -> their centres, (M, D) or (M, sub_centres, D)


def _npy(path: Path, table: Table) -> Read:
    row_C = read_npy(path)
    shapes: list[tuple[int, ...]] = [(table.num_classes, table.embedding_size)]
    if table.sub_centres > 1:
        shapes.append((table.num_classes, table.sub_centres, table.embedding_size))
    if row_C.shape not in shapes or row_C.dtype.kind != "f":
        raise ValueError(
            f"it holds {row_C.dtype} {row_C.shape}; expected floating {' or '.join(map(str, shapes))}: a row "
            "for each class"
        )
    return lambda classes: torch.from_numpy(row_C[classes.start : classes.stop].astype("float64"))


def _foreign(path: Path, table: Table) -> Read:
    rows = ForeignRows(replace(find([path]), momentum=[]), table.num_classes, None)
    if rows.width != table.embedding_size:
        raise ValueError(f"it holds centres of {rows.width} features; expected {table.embedding_size}")
    rows.set_state(RowSGD(0.0, 0.0), touched=0)
    return lambda classes: rows.read(classes)["centres"]


def _write(table: Table, read: Read) -> None:
    rows = table.rows
    each = max(1, _CHUNK // (table.embedding_size * table.sub_centres))
    for start in range(rows.start, rows.stop, each):
        classes = range(start, min(start + each, rows.stop))
        centre_M = read(classes)
        length_M = centre_M.double().norm(dim=-1).reshape(len(classes), -1)
        is_bad_M = ~(length_M.isfinite() & (length_M > 0)).all(dim=1)
        if is_bad_M.any():
            raise ValueError(f"the centre of class {start + int(is_bad_M.int().argmax())} has NaN or Inf, or length 0")
        rows.write_centres(classes.start, classes.stop, torch.arange(classes.start, classes.stop), centre_M)
