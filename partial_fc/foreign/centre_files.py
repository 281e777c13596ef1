"""Sets of other trainers' centre files, one per rank, and the rows in them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from partial_fc.checkpoint.rows import class_numbers
from partial_fc.foreign import arcface_torch, ndarray_file
from partial_fc.foreign.arcface_torch import RankCentres
from partial_fc.head.rows import RowOptimizer
from partial_fc.head.rows.class_rows import Column
from partial_fc.head.shard import Shard


def _from_mxnet(path: Path, momentum: Path | None) -> RankCentres:
    centres = RankCentres(_only_matrix(path))
    if momentum is not None:
        centres.add_momentum(_only_matrix(momentum), momentum)
    return centres


def _only_matrix(path: Path) -> Tensor:
    arrays = ndarray_file.read(path)
    if len(arrays) != 1 or next(iter(arrays.values())).dim() != 2:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in list(arrays.items())[:8])
        raise ValueError(f"{path} holds {len(arrays)} arrays: {shapes}; expected one, of (classes, D)")
    return next(iter(arrays.values()))


class FileKind(NamedTuple):
    """A kind of file: one per rank, and maybe another one with its momentum. read: (file, that one) -> centres."""

    what: str
    name: re.Pattern[str]
    read: Callable[[Path, Path | None], RankCentres]
    momentum: re.Pattern[str] | None = None


# All ranks have equally many rows, of which the last ones may be padding.
MXNET = FileKind(
    "InsightFace's R_centers.param",
    re.compile(r"(\d+)_centers\.param"),
    _from_mxnet,
    re.compile(r"(\d+)_centers_mom\.param"),
)
CHECKPOINT = FileKind(
    "arcface_torch's checkpoint_gpu_R.pt",
    re.compile(r"checkpoint_gpu_(\d+)\.pt"),
    lambda path, _momentum: arcface_torch.from_checkpoint(path),
)
_SOFTMAX_FC = FileKind(
    "arcface_torch's softmax_fc_gpu_R.pt", re.compile(r"softmax_fc_gpu_(\d+)\.pt"), arcface_torch.from_weights
)
_WEIGHT = FileKind(
    "arcface_torch's rank_R_softmax_weight.pt",
    re.compile(r"rank[_:](\d+)_softmax_weight\.pt"),
    arcface_torch.from_weights,
    re.compile(r"rank[_:](\d+)_softmax_weight_mom\.pt"),
)
_KINDS = (MXNET, CHECKPOINT, _SOFTMAX_FC, _WEIGHT)


@dataclass(frozen=True)
class CentreFiles:
    """The files of all ranks, in order; momentum: as many, or none."""

    kind: FileKind
    paths: list[Path]
    momentum: list[Path]

    def read(self, rank: int) -> RankCentres:
        return self.kind.read(self.paths[rank], self.momentum[rank] if self.momentum else None)


def are_in(folder: Path) -> bool:
    """Returns whether a folder has centre files of a known kind."""
    return any(kind.name.fullmatch(path.name) for path in folder.iterdir() for kind in _KINDS)


def find(paths: Iterable[Path]) -> CentreFiles:
    """Finds the files in paths and folders. Raises ValueError for an unknown kind, mixed kinds, or a missing rank."""
    listed = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    for path in listed:
        if not path.exists():
            raise ValueError(f"{path} not found")
    by_kind = [(kind, _by_rank(kind.name, listed), _by_rank(kind.momentum, listed)) for kind in _KINDS]
    given = [(kind, files, momentum) for kind, files, momentum in by_kind if files or momentum]
    if len(given) != 1:
        known = "; ".join(kind.what for kind in _KINDS)
        several = " and ".join(kind.what for kind, _, _ in given)
        raise ValueError(
            f"{len(listed)} file(s) given, of them {several or 'none of a known kind'}; expected the files of all "
            f"ranks, of one kind: {known}"
        )
    ((kind, files, momentum),) = given
    size = max((*files, *momentum)) + 1
    missing = sorted(set(range(size)) - files.keys())
    if missing:
        raise ValueError(f"{kind.what}: ranks 0 to {size - 1}, but none of rank {missing[0]}: give all of them")
    if momentum and len(momentum) < size:
        lack = min(set(range(size)) - momentum.keys())
        raise ValueError(f"{kind.what}: the momentum of rank {lack} is missing: give all of them, or none")
    return CentreFiles(kind, [files[r] for r in range(size)], [momentum[r] for r in sorted(momentum)])


def _by_rank(name: re.Pattern[str] | None, listed: Sequence[Path]) -> dict[int, Path]:
    paths: dict[int, Path] = {}
    for path in listed:
        if name and (matched := name.fullmatch(path.name)):
            rank = int(matched[1])
            if rank in paths:
                raise ValueError(f"{paths[rank]} and {path} are both of rank {rank}: give one set of files")
            paths[rank] = path
    return paths


class ForeignRows:
    """The centres of all ranks, with an optimizer's state. Keeps one rank's files in memory at a time."""

    def __init__(self, files: CentreFiles, num_classes: int | None, mxnet_lr: float | None):
        """num_classes: all; None if the files state it. mxnet_lr: of the last step, which MXNet's momentum includes.
        Raises ValueError for inconsistent files."""
        has_mxnet_momentum = files.kind is MXNET and bool(files.momentum)
        if has_mxnet_momentum and mxnet_lr is None:
            raise ValueError(
                f"{files.momentum[0]}: momentum of MXNet holds the learning rate; give --momentum-lr, that of the last "
                "steps, or give the R_centers.param files alone"
            )
        if mxnet_lr is not None and not has_mxnet_momentum:
            raise ValueError("--momentum-lr goes with R_centers_mom.param; none is given")
        # MXNet: m' = momentum m - lr d, w' = w + m'. Here: m' = momentum m + d, w' = w - lr m'.
        self._momentum_unit = -mxnet_lr if mxnet_lr is not None else 1.0
        self._files = files
        self._loaded = 0, files.read(0)
        first = self._loaded[1]
        self.width = first.centre_LD.shape[1]
        self.file_states = set(first.state)
        self.notes = list(first.notes)
        self.columns: dict[str, Column] = {}
        self._touched = 0
        counts = []
        for rank, path in enumerate(files.paths):
            centre_LD = self._centres(rank).centre_LD
            if centre_LD.shape[1] != self.width:
                raise ValueError(f"{path}: centres of {centre_LD.shape[1]} features; {self.width} in {files.paths[0]}")
            counts.append(len(centre_LD))
        self.start, self.stop = 0, _num_classes(files, counts, num_classes)
        self._start_W = torch.tensor([sum(counts[:rank]) for rank in range(len(counts))])

    def set_state(self, optimizer: RowOptimizer, touched: int) -> None:
        """Gives the rows this optimizer's state; what the files lack is zero. touched: steps credited to each row."""
        row, one = Column((self.width,), torch.float32), Column((1,), torch.float32)
        states = {name: row if width == "row" else one for name, width in optimizer.state_widths().items()}
        self.columns = {"centres": row, **states, "touched": Column((1,), torch.int32)}
        self._touched = touched

    def created(self, start: int, stop: int) -> Tensor:
        return torch.ones(stop - start, dtype=torch.bool)

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        class_M = class_numbers(classes)
        rows = {name: torch.zeros(len(class_M), *c.shape, dtype=c.dtype) for name, c in self.columns.items()}
        rows["touched"] += self._touched
        rank_M = torch.searchsorted(self._start_W, class_M, right=True) - 1
        for rank in rank_M.unique().tolist():
            at_K = (rank_M == rank).nonzero().squeeze(1)
            local_K = class_M[at_K] - self._start_W[rank]
            centres = self._centres(rank)
            for name, tensor in {"centres": centres.centre_LD, **centres.state}.items():
                if name in rows:
                    unit = self._momentum_unit if name == "momentum" else 1.0
                    rows[name].index_copy_(0, at_K, tensor.index_select(0, local_K).float() / unit)
        return rows

    def _centres(self, rank: int) -> RankCentres:
        if self._loaded[0] != rank:
            self._loaded = rank, self._files.read(rank)
        return self._loaded[1]


def _num_classes(files: CentreFiles, counts: list[int], asked: int | None) -> int:
    """Returns the number of classes of the ranks' rows. Raises ValueError if that is impossible."""
    total, size = sum(counts), len(counts)
    what = f"{files.kind.what}: {size} file(s) with {', '.join(map(str, counts[:8]))} rows"
    if files.kind is MXNET and size > 1:
        fewest = total - size + 1
        if asked is None:
            raise ValueError(
                f"{what}; the last ones may be padding, so they are of {fewest} to {total} classes: give --num-classes"
            )
        if len(set(counts)) > 1 or not fewest <= asked <= total:
            raise ValueError(f"{what}; expected {-(-asked // size)} each for --num-classes {asked}")
        return asked
    for rank, count in enumerate(counts):
        if count != len(Shard.of(total, rank, size)):
            raise ValueError(
                f"{what}; expected {len(Shard.of(total, rank, size))} in {files.paths[rank]}: are all files of one run?"
            )
    if asked is not None and asked != total:
        raise ValueError(f"{what}, which are {total} classes; --num-classes says {asked}")
    return total
