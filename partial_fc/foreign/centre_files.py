"""The files of other trainers that belong together, and the rows that they hold."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from partial_fc.checkpoint.rows import class_numbers
from partial_fc.foreign import arcface_torch, mxnet_ndarray
from partial_fc.foreign.arcface_torch import RankCentres
from partial_fc.head.class_rows import Column
from partial_fc.head.shard import Shard


@dataclass(frozen=True)
class FileKind:
    """A sort of files: one for each rank, and maybe another one with its momentum."""

    what: str
    name: re.Pattern[str]
    momentum: re.Pattern[str] | None = None
    even: bool = False  # all ranks have as many rows: the last ones may be padding


KINDS = {
    "mxnet": FileKind(
        "InsightFace's R_centers.param",
        re.compile(r"(\d+)_centers\.param"),
        re.compile(r"(\d+)_centers_mom\.param"),
        even=True,
    ),
    "checkpoint": FileKind("arcface_torch's checkpoint_gpu_R.pt", re.compile(r"checkpoint_gpu_(\d+)\.pt")),
    "softmax_fc": FileKind("arcface_torch's softmax_fc_gpu_R.pt", re.compile(r"softmax_fc_gpu_(\d+)\.pt")),
    "weight": FileKind(
        "arcface_torch's rank_R_softmax_weight.pt",
        re.compile(r"rank[_:](\d+)_softmax_weight\.pt"),
        re.compile(r"rank[_:](\d+)_softmax_weight_mom\.pt"),
    ),
}


@dataclass(frozen=True)
class CentreFiles:
    """The files of all ranks, in order; momentum: as many, or none."""

    kind: str
    paths: list[Path]
    momentum: list[Path]


def find(paths: Iterable[Path]) -> CentreFiles:
    """paths: files, or folders that are looked through. Raises ValueError where they are of no known kind, of several,
    or where a rank's is missing."""
    listed = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    for path in listed:
        if not path.exists():
            raise ValueError(f"{path} not found")
    here: dict[str, tuple[dict[int, Path], dict[int, Path]]] = {}
    for name, kind in KINDS.items():
        files, momentum = _by_rank(kind.name, listed), _by_rank(kind.momentum, listed)
        if files or momentum:
            here[name] = files, momentum
    if len(here) != 1:
        known = "; ".join(kind.what for kind in KINDS.values())
        several = " and ".join(KINDS[name].what for name in here)
        raise ValueError(
            f"{len(listed)} file(s) given, of them {several or 'none of a known kind'}; expected the files of all "
            f"ranks, of one kind: {known}"
        )
    ((name, (files, momentum)),) = here.items()
    size = max((*files, *momentum)) + 1
    missing = sorted(set(range(size)) - files.keys())
    if missing:
        raise ValueError(f"{KINDS[name].what}: ranks 0 to {size - 1}, but none of rank {missing[0]}: give all of them")
    if momentum and len(momentum) < size:
        lack = min(set(range(size)) - momentum.keys())
        raise ValueError(f"{KINDS[name].what}: the momentum of rank {lack} is missing: give all of them, or none")
    return CentreFiles(name, [files[r] for r in range(size)], [momentum[r] for r in sorted(momentum)])


def _by_rank(name: re.Pattern[str] | None, listed: Sequence[Path]) -> dict[int, Path]:
    paths: dict[int, Path] = {}
    for path in listed:
        matched = name.fullmatch(path.name) if name else None
        if matched:
            rank = int(matched[1])
            if rank in paths:
                raise ValueError(f"{paths[rank]} and {path} are both of rank {rank}: give one set of files")
            paths[rank] = path
    return paths


class ForeignRows:
    """The centres of all ranks, with an optimizer's state for training here. A rank's files at a time are in memory."""

    def __init__(
        self, files: CentreFiles, num_classes: int | None, state: dict[str, bool], touched: int, mxnet_lr: float | None
    ):
        """num_classes: all; None where the files say. state: the optimizer's columns by name, and whether they are as
        wide as centres; what the files do not have is zero. touched: steps that rows stand for. mxnet_lr: of the last
        step, which momentum of MXNet holds. Raises ValueError where the files do not fit together."""
        self._load: Callable[[int], RankCentres] = _loader(files, mxnet_lr)
        self._touched = touched
        first = self._load(0)
        self.width = first.centre_LD.shape[1]
        self.file_states = set(first.state)
        self.notes = list(first.notes)
        self._state = state
        counts = []
        for rank, path in enumerate(files.paths):
            centre_LD = first.centre_LD if rank == 0 else self._load(rank).centre_LD
            if centre_LD.shape[1] != self.width:
                raise ValueError(f"{path}: centres of {centre_LD.shape[1]} features; {self.width} in {files.paths[0]}")
            counts.append(len(centre_LD))
        self.start, self.stop = 0, _num_classes(files, counts, num_classes)
        self._start_W = torch.tensor([sum(counts[:rank]) for rank in range(len(counts))])
        self._loaded: tuple[int, RankCentres] = (0, first)

    @property
    def columns(self) -> dict[str, Column]:
        wide, narrow = Column((self.width,), torch.float32), Column((1,), torch.float32)
        states = {name: wide if as_wide else narrow for name, as_wide in self._state.items()}
        return {"centres": wide, **states, "touched": Column((1,), torch.int32)}

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
            if self._loaded[0] != rank:
                self._loaded = rank, self._load(rank)
            centres = self._loaded[1]
            for name, tensor in {"centres": centres.centre_LD, **centres.state}.items():
                if name in rows:
                    unit = centres.momentum_unit if name == "momentum" else 1.0
                    rows[name].index_copy_(0, at_K, tensor.index_select(0, local_K).float() / unit)
        return rows


def _loader(files: CentreFiles, mxnet_lr: float | None) -> Callable[[int], RankCentres]:
    def load(rank: int) -> RankCentres:
        path = files.paths[rank]
        momentum = files.momentum[rank] if files.momentum else None
        if files.kind == "mxnet":
            return _from_mxnet(path, momentum, mxnet_lr)
        if files.kind == "checkpoint":
            return arcface_torch.from_checkpoint(path)
        return arcface_torch.from_weights(path, momentum)

    return load


def _from_mxnet(path: Path, momentum: Path | None, lr: float | None) -> RankCentres:
    centres = RankCentres(_only_matrix(path))
    if momentum is not None:
        if lr is None:
            raise ValueError(
                f"{momentum}: momentum of MXNet holds the learning rate; give --momentum-lr, that of the last steps, "
                "or give the R_centers.param files alone"
            )
        # There: m' = momentum m - lr d, w' = w + m'. Here: m' = momentum m + d, w' = w - lr m'.
        mom_LD = _only_matrix(momentum)
        if mom_LD.shape != centres.centre_LD.shape:
            raise ValueError(
                f"{momentum} has shape {tuple(mom_LD.shape)}; the centres in {path} have "
                f"{tuple(centres.centre_LD.shape)}"
            )
        centres.state["momentum"], centres.momentum_unit = mom_LD, -lr
    return centres


def _only_matrix(path: Path) -> Tensor:
    arrays = mxnet_ndarray.read(path)
    if len(arrays) != 1 or next(iter(arrays.values())).dim() != 2:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in list(arrays.items())[:8])
        raise ValueError(f"{path} holds {len(arrays)} arrays: {shapes}; expected one, of (classes, D)")
    return next(iter(arrays.values()))


def _num_classes(files: CentreFiles, counts: list[int], asked: int | None) -> int:
    """The number of classes that the ranks' rows are of. Raises ValueError where that cannot be."""
    total, size = sum(counts), len(counts)
    what = f"{KINDS[files.kind].what}: {size} file(s) with {', '.join(map(str, counts[:8]))} rows"
    if KINDS[files.kind].even and size > 1:
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
