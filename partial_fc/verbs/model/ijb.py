"""IJB-B and IJB-C, 1:1 and 1:N, in InsightFace's layout of crops and lists.

    meta/ijbc_name_5pts_score.txt       image, five points (x y each), detector's score; one line an image
    meta/ijbc_face_tid_mid.txt          image, template, media; the same images in the same order
    meta/ijbc_template_pair_label.txt   template, template, 1: of one subject or 0
    meta/ijbc_1N_gallery_G1.csv, _G2.csv   template, subject, ... below a header (IJB-B: S1, S2)
    meta/ijbc_1N_probe_mixed.csv        the same
    loose_crop/                         the images

A template is a set of images of one subject, from several media (photos, videos). Its feature is the sum over its media
of the mean over the images of each, scaled to length 1 (Xie and Zisserman, 2018; InsightFace's evaluation). N images, D
feature width, T templates, M pairs.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.comm import World
from partial_fc.data.decode import decode
from partial_fc.data.sample import BadRecord, Sample, naming
from partial_fc.embedding.images import Pixels
from partial_fc.embedding.sources import NO_CLASS, ImageFiles
from partial_fc.evaluate.identification import Found, search
from partial_fc.files import check_regular, read_text

RANKS = (1, 5, 10)
_GALLERIES = {"IJBB": ("S1", "S2"), "IJBC": ("G1", "G2")}
# Positions of eyes, nose and corners of the mouth in an image of 112 x 112 pixels, as in InsightFace's training sets.
_POINTS = np.array([(38.2946, 51.6963), (73.5318, 51.5014), (56.0252, 71.7366), (41.5493, 92.3655), (70.7299, 92.2041)])
_PAIRS_AT_ONCE = 16384
_LARGEST = float(np.finfo(np.float32).max)


class Aligned(ImageFiles):
    """Images aligned by their five points to the positions of the training sets."""

    def __init__(self, root: Path, names: list[str], points_N52: NDArray[np.float64], size: int):
        super().__init__(root, names)
        self.points_N52, self.size = points_N52, size

    def read(self, index: int) -> Sample:
        content = self.read_file(index)
        with naming(self, index):
            image = align(decode(content), self.points_N52[index], self.size)
        return Sample(image, NO_CLASS, index)


@dataclass
class Ijb:
    """The lists of one target, checked; reads no image yet."""

    folder: Path
    target: Literal["IJBB", "IJBC"]
    image_size: int

    def __post_init__(self) -> None:
        path = self._meta("name_5pts_score.txt")
        self.names, points_N52, self.score_N = _read_points(path)
        self.images = Aligned(self.folder / "loose_crop", self.names, points_N52, self.image_size)
        self.template_N, self.media_N = self._read_templates(self._meta("face_tid_mid.txt"))
        pairs = self._meta("template_pair_label.txt")
        first_M, second_M, same_M = _numbers(pairs, (0, 1, 2)).T
        self.templates = np.unique(self.template_N)
        self.first_M, self.second_M = (self._places(t, pairs) for t in (first_M, second_M))
        if not np.isin(same_M, (0, 1)).all() or same_M.all() or not same_M.any():
            raise ValueError(f"{pairs}: the third number of a line is 1 (of one subject) or 0; both must occur")
        self.same_M = same_M.astype(bool)

    @cached_property
    def galleries(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Returns name -> (indices of its templates, subjects); the probes are "probe". Empty without these lists.
        Raises ValueError if only some exist."""
        names = {name: f"1N_gallery_{name}.csv" for name in _GALLERIES[self.target]} | {"probe": "1N_probe_mixed.csv"}
        if not any(self._path(file).exists() for file in names.values()):
            return {}
        return {name: self._read_subjects(self._meta(file)) for name, file in names.items()}

    def _path(self, name: str) -> Path:
        return self.folder / "meta" / f"{self.target.lower()}_{name}"

    def _meta(self, name: str) -> Path:
        if not self._path(name).exists():
            raise ValueError(f"{self._path(name)} not found; expected the folder of {self.target}: meta and loose_crop")
        return self._path(name)

    def _read_templates(self, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        template_N, media_N = _numbers(path, (1, 2)).T
        names = [line.split()[0] for line in read_text(path, errors="surrogateescape").splitlines() if line.strip()]
        if len(names) != len(self.names):
            raise ValueError(
                f"{path} has {len(names)} lines; expected one for each of the {len(self.names)} images of "
                f"{self._path('name_5pts_score.txt')}"
            )
        for number, (one, other) in enumerate(zip(names, self.names, strict=True), start=1):
            if Path(one).name != Path(other).name:
                raise ValueError(f"{path}, line {number}: image {one}, where the list of points has {other}")
        return template_N, media_N

    def _read_subjects(self, path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        table = _numbers(path, (0, 1), delimiter=",", skip=1)
        # One of a template's lines is enough.
        template, first = np.unique(table[:, 0], return_index=True)
        return self._places(template, path), table[first, 1]

    def _places(self, template: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
        place = np.searchsorted(self.templates, template).clip(max=len(self.templates) - 1)
        unknown = np.flatnonzero(self.templates[place] != template)
        if len(unknown):
            raise ValueError(
                f"{path}: template {template[unknown[0]]} has no image in {self._path('face_tid_mid.txt')} "
                f"({len(unknown)} such in all)"
            )
        return place


def align(image: Pixels, points_52: NDArray[np.float64], size: int) -> Pixels:
    """Aligns the image by a similarity transform, in the least squares sense, of its five points to those of the
    training sets; size x size pixels, black outside. Raises BadRecord for coinciding points."""
    # x' = a x - b y + u and y' = b x + a y + v are linear in a, b, u, v.
    x, y, one, zero = *points_52.T, np.ones(5), np.zeros(5)
    equations = np.concatenate((np.stack((x, -y, one, zero), 1), np.stack((y, x, zero, one), 1)))
    wanted = (_POINTS * size / 112).T.ravel()
    (a, b, u, v), _, rank, _ = np.linalg.lstsq(equations, wanted, rcond=None)
    if rank < 4:
        raise BadRecord(f"its five points are one and the same: {points_52.tolist()}")
    matrix = np.array(((a, -b, u), (b, a, v)))
    return np.asarray(cv2.warpAffine(image, matrix, (size, size), flags=cv2.INTER_LINEAR), np.uint8)


def pool(
    feat_ND: NDArray[np.float32], template_N: NDArray[np.int64], media_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns (T, D) of length 1, templates in ascending order."""
    order = np.lexsort((media_N, template_N))
    bounds = [0, *(np.flatnonzero(np.diff(template_N[order])) + 1), len(order)]
    template_TD = np.empty((len(bounds) - 1, feat_ND.shape[1]))
    for place, (start, stop) in enumerate(pairwise(bounds)):
        images = order[start:stop]
        media_starts = np.concatenate(([0], np.flatnonzero(np.diff(media_N[images])) + 1))
        sums = np.add.reduceat(feat_ND[images].astype(np.float64), media_starts)
        counts = np.diff(np.append(media_starts, len(images)))
        template_TD[place] = (sums / counts[:, None]).sum(axis=0)
    return template_TD / np.linalg.norm(template_TD, axis=1, keepdims=True)


def verify(template_TD: NDArray[np.float64], ijb: Ijb, world: World) -> NDArray[np.float64]:
    """Returns the squared distances of all pairs, (M,), on every rank; each computes its part."""
    num_blocks = -(-len(ijb.same_M) // _PAIRS_AT_ONCE)
    parts = [np.empty(0)]
    for block in range(num_blocks * world.rank // world.size, num_blocks * (world.rank + 1) // world.size):
        some = slice(block * _PAIRS_AT_ONCE, (block + 1) * _PAIRS_AT_ONCE)
        difference = template_TD[ijb.first_M[some]] - template_TD[ijb.second_M[some]]
        parts.append(np.einsum("md,md->m", difference, difference))
    distance_m = torch.from_numpy(np.concatenate(parts))
    return world.all_gather(distance_m, name="evaluate/ijb/distances").numpy()


def values_1_n(
    template_TD: NDArray[np.float64], ijb: Ijb, world: World, device: torch.device
) -> Iterator[tuple[str, float]]:
    """Yields the values of each gallery, as Found.values; for both together: ranks over the probes with a mate in one,
    and the means of TPIR and map@r."""
    row_TD = template_TD.astype(np.float32)
    probe, probe_subject = ijb.galleries["probe"]
    of_both: list[tuple[Found, dict[str, float]]] = []
    for name in _GALLERIES[ijb.target]:
        gallery, subject = ijb.galleries[name]
        found = search(row_TD[probe], probe_subject, row_TD[gallery], subject, world, device,
                       name=f"{ijb.target} {name}", max_rank=max(RANKS))  # fmt: skip
        values = dict(found.values(RANKS))
        of_both.append((found, values))
        yield from ((f"{name}/{key}", value) for key, value in values.items())
    num_mates = sum(int(found.has_mate_P.sum()) for found, _ in of_both)
    for rank in RANKS:
        right = sum(int(((found.rank_P > 0) & (found.rank_P <= rank)).sum()) for found, _ in of_both)
        yield f"both/rank{rank}", right / num_mates
    for key in of_both[0][1]:
        if key.startswith(("tpir", "map")):
            yield f"both/{key}", sum(values[key] for _, values in of_both) / len(of_both)


def _read_points(path: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.float32]]:
    names, numbers = [], []
    for number, line in enumerate(read_text(path, errors="surrogateescape").splitlines(), start=1):
        name, *rest = line.split() or [""]
        try:
            values = [float(field) for field in rest]
        except ValueError:
            values = []
        if len(values) != 11 or not all(abs(value) <= _LARGEST for value in values):
            raise ValueError(
                f"{path}, line {number}: expected an image, ten coordinates and a score, got {line.strip()[:200]!r}"
            )
        names.append(name)
        numbers.append(values)
    if not names:
        raise ValueError(f"{path} names no images")
    table = np.array(numbers)
    return names, table[:, :10].reshape(-1, 5, 2), table[:, 10].astype(np.float32)


def _numbers(path: Path, columns: tuple[int, ...], delimiter: str | None = None, skip: int = 0) -> NDArray[np.int64]:
    """Reads some columns of a table, (lines, columns); skip: header lines. Raises ValueError that names a bad row."""
    check_regular(path)
    try:
        with warnings.catch_warnings(action="error"):  # numpy only warns of an empty file
            return np.loadtxt(
                path, np.int64, comments=None, usecols=columns, ndmin=2, delimiter=delimiter, skiprows=skip
            )
    except (ValueError, UserWarning) as error:
        raise ValueError(f"{path}: expected whole numbers in columns {columns} (from 0) of each row: {error}") from None
