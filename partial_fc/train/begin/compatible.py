"""The older model of --compatible-with: its file, and its class centres in the classes of this run.

A class that the older model knows, by name, gets that centre; another one the mean direction of its images' embeddings
by the older model (imprint.py). Each rank writes the rows of its own classes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from partial_fc.checkpoint.class_names import names_of
from partial_fc.checkpoint.consistency import open_centres
from partial_fc.checkpoint.head_state import tables_in
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import World, all_or_raise
from partial_fc.data import Source
from partial_fc.embedding.load import from_checkpoint, load
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.evaluate.evaluation import Forward
from partial_fc.findings import counted
from partial_fc.foreign.centre_files import ForeignRows, are_in, find
from partial_fc.head import PartialFC
from partial_fc.head.rows import RowSGD
from partial_fc.train.begin.imprint import imprint
from partial_fc.train.context import Context

_CHUNK = 1 << 14  # classes that are read at a time
_BACKBONES = ("checkpoint_gpu_0.pt", "model.pt", "backbone.pth")  # beside arcface_torch's centre files


@dataclass
class OlderModel:
    """A model with class centres. read: class numbers, (K,) -> their centres, (K, D). created: tells which of them were
    ever trained. names: of the classes, by number; None: they have only numbers."""

    model: EmbeddingModel
    num_classes: int
    names: list[str] | None
    read: Callable[[Tensor], Tensor]
    created: Callable[[Tensor], Tensor]

    @property
    def contract(self) -> dict[str, str]:
        return self.model.facts()

    @contextmanager
    def evaluating(self) -> Iterator[Forward]:
        yield self.model.forward


def open_older(path: Path, world: World, device: torch.device, trust_code: bool) -> OlderModel:
    """Opens a run, a checkpoint, or a folder with arcface_torch's centre files and backbone. Raises ValueError, on all
    ranks, for one without class centres or without a backbone. A collective."""
    what = f": --compatible-with {path}"
    if path.is_dir() and are_in(path):
        return all_or_raise(lambda: _of_arcface_torch(path, device), world, "start/older", what)
    try:
        stored = open_centres(path, world)
    except ValueError as error:
        raise ValueError(f"--compatible-with: {error}") from error

    def opened() -> OlderModel:
        facts = tables_in(stored.manifest, stored.where)
        if "" not in facts or facts[""]["sub_centres"] > 1:
            raise ValueError(
                f"it has {'several heads' if len(facts) > 1 else 'sub-centres'}; expected a centre a class"
            )
        stored.check_has_backbone()
        rows = rows_now(stored)
        model = from_checkpoint(stored, None, trust_code).model().to(device)
        created_C = rows.created(0, rows.stop)
        return OlderModel(
            model, rows.stop, stored.class_names_of(""), lambda class_K: rows.read(class_K)["centres"],
            created_C.__getitem__,
        )  # fmt: skip

    return all_or_raise(opened, world, "start/older", what)


def _of_arcface_torch(path: Path, device: torch.device) -> OlderModel:
    backbone = next((path / name for name in _BACKBONES if (path / name).is_file()), None)
    if backbone is None:
        raise ValueError(f"class centres without a backbone; expected {', '.join(_BACKBONES)} beside them")
    rows = ForeignRows(replace(find([path]), momentum=[]), None, None)
    rows.set_state(RowSGD(0.0, 0.0), touched=0)
    every = torch.ones(rows.stop, dtype=torch.bool)
    return OlderModel(
        load(backbone, device), rows.stop, None, lambda class_K: rows.read(class_K)["centres"], every.__getitem__
    )


def write_centres(run: Context, older: OlderModel, table: PartialFC, source: Source, given: Path) -> None:
    """Writes the older model's centres of the source's classes. A collective. Raises ValueError, on all ranks, if the
    classes cannot be matched, or none is known."""
    what, world = f"--compatible-with {given}", run.world
    old_C = all_or_raise(lambda: _matched(older, names_of(source, table.num_classes), table.num_classes), world,
                         "start/matched", f": {what}")  # fmt: skip
    known_C = (old_C >= 0) & older.created(old_C.clamp(min=0))
    num_known, rows = int(known_C.sum()), table.rows
    run.logger.info(f"{what}: it knows {num_known:,} of {counted(table.num_classes, 'class')}")
    if num_known < table.num_classes:
        imprint(older, table, source, run.logger, what=what, known_C=known_C)

    def write() -> None:
        for start in range(rows.start, rows.stop, _CHUNK):
            stop = min(start + _CHUNK, rows.stop)
            is_known_k = known_C[start:stop]
            centre_kD = torch.zeros(stop - start, table.embedding_size)
            imprinted_k = rows.created(start, stop)
            for of_k, read, number_k in (
                (imprinted_k, lambda class_M: rows.read(class_M)["centres"], torch.arange(start, stop)),
                (is_known_k, older.read, old_C[start:stop]),
            ):
                centre_kD[of_k] = read(number_k[of_k]).float().cpu()
            length_k = centre_kD.norm(dim=1)
            if (is_bad_k := is_known_k & ~(length_k.isfinite() & (length_k > 0))).any():
                bad = int(old_C[start + int(is_bad_k.int().argmax())])
                raise ValueError(f"the centre of its class {bad} has NaN or Inf, or length 0")
            class_M = (is_known_k | imprinted_k).nonzero().squeeze(1)
            rows.write_centres(start, stop, class_M + start, centre_kD[class_M] / length_k[class_M, None])

    all_or_raise(write, world, "start/older_rows", f": {what}")


def _matched(older: OlderModel, names: list[str] | None, num_classes: int) -> Tensor:
    """Returns each class's number in the older model, -1 for a class that it does not know: int64 (C,)."""
    if (names is None) != (older.names is None):
        has, lacks = ("it", "the data") if names is None else ("the data", "it")
        raise ValueError(
            f"{has} has names for its classes, {lacks} only numbers, so they cannot be matched: `partial-fc checkpoint "
            "classes rename` gives a checkpoint names"
        )
    if names is None or older.names is None:
        number_C = torch.arange(num_classes)
        return number_C.masked_fill_(number_C >= older.num_classes, -1)
    number_of = {name: number for number, name in enumerate(older.names)}
    old_C = torch.tensor([number_of.get(name, -1) for name in names])
    if not bool((old_C >= 0).any()):
        raise ValueError(f"none of its {counted(len(older.names), 'class')} ({older.names[0]!r}, ...) is in the data, "
                         f"which has {names[0]!r}, ...")  # fmt: skip
    return old_C
