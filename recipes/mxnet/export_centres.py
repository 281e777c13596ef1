"""`partial-fc checkpoint export`: the class centres of a checkpoint in InsightFace's MXNet format.

    R_centers.param, R_centers_mom.param     of rank R of W: one array without a name, fp32 (ceil(C / W), D)

(MemoryBank in recognition/partial_fc/mxnet/memory_bank.py. All ranks have equally many rows; rows after the last class
are start values, there and here.)
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from partial_fc.files import check_new, make_folders, sync_folder
from partial_fc.flags.facts import PROCESSES, In

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.checkpoint.rows_now import RowsNow


@dataclass(frozen=True)
class ExportOptions:
    """Writes the class centres of a checkpoint in the format of InsightFace's MXNet trainer: R_centers.param for each
    of its ranks, and with --momentum-lr R_centers_mom.param. `partial-fc convert` converts the backbone."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder of checkpoints, of which the newest is used; several if each host has its own
    folder."""
    out: Path
    """The folder to write to (that trainer's --models-root)."""
    world_size: Annotated[int, In(PROCESSES)]
    """Number of ranks of that trainer."""
    table: str = ""
    """The head whose centres are written, of a run with several."""
    momentum_lr: Annotated[float | None, In("(0, inf)")] = None
    """The learning rate of the last steps, which MXNet's momentum includes; none: no momentum is written."""


def export_centres(options: ExportOptions) -> None:
    """Writes the files. Raises ValueError if the checkpoint has no such centres, or a file exists."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.output import print_notes
    from partial_fc.checkpoint.read import open_with_centres
    from partial_fc.checkpoint.rows_now import rows_now
    from partial_fc.foreign import ndarray_file

    size, lr = options.world_size, options.momentum_lr
    stored = open_with_centres(*options.folders, table=options.table)
    facts = tables_in(stored.manifest, stored.where)[options.table]
    rows = rows_now(stored, table=options.table)
    _check(facts, stored.where, rows, lr)
    num_local = -(-rows.stop // size)
    columns = {"centers": "centres"} | ({"centers_mom": "momentum"} if lr is not None else {})
    paths = [[options.out / f"{rank}_{ending}.param" for ending in columns] for rank in range(size)]
    check_new(*(path for of_rank in paths for path in of_rank))
    make_folders(options.out)
    try:
        # The centres of rank 0 last: without them `import` and InsightFace ignore the others.
        for rank, of_rank in reversed([*enumerate(paths)]):
            for path, column in reversed([*zip(of_rank, columns.values(), strict=True)]):
                # MXNet: m' = momentum m - lr d, w' = w + m'. Here: m' = momentum m + d, w' = w - lr m'.
                unit = 1.0 if column == "centres" or lr is None else -lr
                array = _rows_of_rank(facts, rows, column, unit, rank * num_local, num_local)
                if path == paths[0][0]:
                    sync_folder(options.out)
                ndarray_file.write(path, [array], durable=True)
        sync_folder(options.out)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is reported
            paths[0][0].unlink(missing_ok=True)
            sync_folder(options.out)
            for path in (path for of_rank in paths for path in of_rank):
                path.unlink(missing_ok=True)
        raise
    print_notes(_notes(rows, num_local * size, lr))
    print(
        f"{options.out}: {rows.stop} classes of {facts['embedding_size']} features, {num_local} rows for "
        f"each of {size} rank(s){'' if lr is None else ', with momentum'}"
    )


def _check(facts: Mapping[str, Any], where: str, rows: "RowsNow", lr: float | None) -> None:
    if facts["sub_centres"] != 1:
        raise ValueError(f"{where} has {facts['sub_centres']} centres a class; those files have one")
    if lr is not None and "momentum" not in rows.columns:
        raise ValueError(
            f"--momentum-lr {lr}: {where} has no momentum; its rows have {', '.join(rows.columns)}. Leave it out"
        )


def _rows_of_rank(
    facts: Mapping[str, Any], rows: "RowsNow", column: str, unit: float, start: int, num_rows: int
) -> "Tensor":
    """Returns a column of rows [start, start + num_rows), fp32, times unit. Padding rows and classes without an update
    have start values, or those of --head-catch-up."""
    import torch

    from partial_fc.checkpoint.rows import cut
    from partial_fc.head.rows.table import initial_centres

    width = facts["embedding_size"]
    start_LD = initial_centres(torch.arange(start, start + num_rows), width, facts["head"]["row_seed"])
    untouched = {name: torch.zeros(num_rows, *c.shape) for name, c in rows.columns.items()}
    row_LD = rows.now({**untouched, "centres": start_LD})[column] * unit + 0.0  # avoids -0.0
    stop = min(start + num_rows, rows.stop)
    for part in cut(rows, min(start, stop), stop):
        row_LD[part.class_N - start] = part.tensors[column].float() * unit
    return row_LD


def _notes(rows: "RowsNow", num_rows: int, lr: float | None) -> Sequence[str]:
    notes = []
    if num_rows > rows.stop:
        notes.append(f"the last {num_rows - rows.stop} row(s) are padding: to read the files back give --num-classes "
                     f"{rows.stop}")  # fmt: skip
    if lr is None and "momentum" in rows.columns:
        notes.append("the centres' momentum is left out; --momentum-lr LR writes it")
    return notes
