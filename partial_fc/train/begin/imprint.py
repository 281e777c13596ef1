"""Imprinting: a class's centre starts at the mean direction of its images' embeddings (Qi, Brown and Lowe, 2018,
"Low-Shot Learning with Imprinted Weights", https://arxiv.org/abs/1712.07136).

    all ranks     choose the first images of each class, in order of class, and cut them into batches
    each rank     embeds every W-th batch, and sends each row to the rank that has its class
    that rank     adds up the rows in fp64, in the order of the images, and writes the mean when a class is complete

So batches and sums, and with them the centres' bits, are the same for any number of ranks; a rank holds the rows of W
batches, and no second copy of its centres.

M chosen images, I of a batch, K classes, D feature width, W ranks.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from logging import Logger
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc import terminal
from partial_fc.checkpoint.consistency import compare_replicas
from partial_fc.comm import World, all_gather_json
from partial_fc.data import Source
from partial_fc.data.check.labels import labels_of
from partial_fc.data.decode import fit
from partial_fc.data.sample import still
from partial_fc.embedding.images import batches, black, pixels_of
from partial_fc.embedding.model import unit_embeddings
from partial_fc.evaluate.evaluation import Forward
from partial_fc.findings import counted
from partial_fc.head import Shard, Table

NUM_IMAGES = 16  # of a class, at most
_BATCH = 64  # not --batch-size, which changes with the number of ranks
_SHORTEST = 1e-6  # mean of unit vectors that has a direction


class Embeds(Protocol):
    """What embeds: TorchBackbone, or an older model (compatible.py)."""

    @property
    def contract(self) -> Mapping[str, str]: ...

    def evaluating(self) -> AbstractContextManager[Forward]: ...


def imprint(
    backbone: Embeds,
    table: Table,
    source: Source,
    logger: Logger,
    first_class: int = 0,
    what: str = "--start-centres imprint",
    known_C: Tensor | None = None,
) -> None:
    """Writes the mean directions, of length 1, by the backbone in evaluation mode, with the flipped image where the
    model adds it. An image with several labels counts for each of their classes. Images that cannot be read do not
    count; classes without images start as without imprinting. first_class: the number that the source gives to the
    table's first class; it may have those of other tables. what: of the user's words. known_C: bool, classes that have
    their centre already. A collective. Raises ValueError, on all ranks, for a mean
    that has NaN, Inf or length 0."""
    facts, world, started = backbone.contract, table.world, time.perf_counter()
    if "flip" not in facts:
        raise ValueError(f"{what} is for networks that embed images or vectors, those of recipe face")
    index_M, class_M = _chosen(table, source, first_class, known_C)
    owner_M = Shard.owners(class_M, table.num_classes, world.size)
    piece = _BATCH * world.size
    images = _own_images(source, facts, index_M, world)
    open_K, open_sum = class_M[:0], torch.zeros(0, table.embedding_size + 1, dtype=torch.float64)  # not complete yet
    num_started, num_bad, problem = 0, 0, None
    with (
        backbone.evaluating() as forward,
        terminal.bar(total=len(index_M), desc="imprint", unit="image", shown=world.rank == 0, leave=False) as bar,
    ):
        for first in range(0, len(index_M), piece):
            # ---- embed; a column of ones counts, and an image that cannot be read adds nothing
            sent_ID = torch.empty(0, table.embedding_size + 1)
            if first + world.rank * _BATCH < len(index_M):
                image_I3HW, bad = next(images)
                unit_ID, _ = unit_embeddings(forward, image_I3HW, facts["flip"] == "true")
                sent_ID = torch.nn.functional.pad(unit_ID.float(), (0, 1), value=1.0)
                sent_ID[list(bad)] = 0.0
                num_bad += len(bad)
            # ---- send each row to the rank of its class: as classes ascend, so do the ranks
            owners = owner_M[first : first + piece]
            sum_ID = _sent_home(sent_ID, owners, world)
            # ---- add up; the last class may go on in the next round
            class_I = class_M[first : first + piece][owners == world.rank]
            class_K, at_I = torch.cat((open_K, class_I)).unique_consecutive(return_inverse=True)
            sum_KD = torch.zeros(len(class_K), sum_ID.shape[1], dtype=torch.float64)
            sum_KD.index_add_(0, at_I, torch.cat((open_sum, sum_ID)))
            num_done = len(class_K) if first + piece >= len(index_M) else max(0, len(class_K) - 1)
            wrong = _write(table, class_K[:num_done], sum_KD[:num_done])
            problem = problem or wrong
            num_started += int((sum_KD[:num_done, -1] > 0).sum())
            open_K, open_sum = class_K[num_done:], sum_KD[num_done:]
            bar.update(len(owners))
    found_W = all_gather_json([problem, num_started, num_bad], world, "imprint/found")
    if problem := next((problem for problem, _, _ in found_W if problem), None):
        raise ValueError(f"{what}: {problem}")
    num_started, num_bad = (sum(found[i] for found in found_W) for i in (1, 2))
    said = (
        f"the centres of {counted(num_started, 'class')} are means of {counted(len(index_M) - num_bad, 'image')}, in "
        f"{time.perf_counter() - started:.1f} s"
    )
    if num_bad:
        said += f"; {counted(num_bad, 'image')} could not be read and do not count"
    if lacking := table.num_classes - num_started - (0 if known_C is None else int(known_C.sum())):
        lack = counted(lacking, "class")
        said += f"; {lack} without images: their centres start at random"
    logger.info(f"{what}: {said}")


def _chosen(table: Table, source: Source, first_class: int, known_C: Tensor | None) -> tuple[NDArray[np.int64], Tensor]:
    """Returns the images to embed, by class, and their classes. A collective. Raises ValueError on all ranks."""
    label_N = labels_of(source)
    assert label_N is not None, "recipe face has no source without labels"
    label_N = label_N.reshape(-1) - first_class
    if known_C is not None:
        inside_N = (label_N >= 0) & (label_N < table.num_classes)
        label_N = np.where(inside_N & ~known_C.numpy()[label_N * inside_N], label_N, -1)
    at_M = first_images(label_N, table.num_classes, NUM_IMAGES)
    index_M, class_M = at_M // source.num_labels, torch.from_numpy(label_N[at_M])
    chosen = {"images": torch.from_numpy(index_M), "their classes": class_M}
    if difference := compare_replicas(chosen, table.world, "imprint/images"):
        raise ValueError(f"--start-centres imprint: the training data is not the same on all ranks: {difference}")
    return index_M, class_M


def _own_images(
    source: Source, facts: Mapping[str, str], index_M: NDArray[np.int64], world: World
) -> Iterator[tuple[Tensor, Collection[int]]]:
    """Returns this rank's batches, every W-th, with the places of images that cannot be read. facts: of the model."""
    size = int(facts.get("image_size", 0))  # 0: of vectors
    blank = black(size) if size else np.zeros(int(facts["input_size"]), np.float32)

    def read(index: int) -> NDArray:
        sample = source.read(index)
        return fit(pixels_of(still(sample)), size) if size else sample.data

    starts = range(world.rank * _BATCH, len(index_M), _BATCH * world.size)
    own = (int(index) for first in starts for index in index_M[first : first + _BATCH])
    return batches(own, read, blank, _BATCH)


def _sent_home(sent_ID: Tensor, owners: Tensor, world: World) -> Tensor:
    """Sends each row to the rank that has its class, and returns those that arrive, in the images' order, in float64.
    owners: of the rows of all ranks. A collective."""
    rows_WW = torch.zeros(world.size, world.size, dtype=torch.int64)
    for rank, owner_I in enumerate(owners.split(_BATCH)):
        rows_WW[rank] = owner_I.bincount(minlength=world.size)
    rows, arriving = rows_WW[world.rank].tolist(), rows_WW[:, world.rank].tolist()
    return world.start_all_to_all(sent_ID, rows, arriving, name="imprint/rows").wait().double()


def first_images(label_N: NDArray[np.int64], num_classes: int, num_images: int) -> NDArray[np.int64]:
    """Returns the first num_images images of each class, by class: places in label_N, (M,)."""
    index_N = np.flatnonzero((label_N >= 0) & (label_N < num_classes))
    index_N = index_N[label_N[index_N].argsort(kind="stable")]
    class_N = label_N[index_N]
    first_N = class_N.searchsorted(class_N)  # of its class
    return index_N[np.arange(len(index_N)) - first_N < num_images]


def _write(table: Table, class_K: Tensor, sum_KD: Tensor) -> str | None:
    """Writes the centres of complete classes, ascending. sum_KD: their embeddings' sums, and numbers of images in the
    last column. Returns what is wrong with one; None: nothing."""
    counted_K = sum_KD[:, -1] > 0
    class_K, sum_KD, num_K = class_K[counted_K], sum_KD[counted_K, :-1], sum_KD[counted_K, -1]
    if not len(class_K):
        return None
    length_K = sum_KD.norm(dim=1)
    is_bad_K = ~(length_K / num_K > _SHORTEST)  # or NaN
    if is_bad_K.any():
        k = int(is_bad_K.int().argmax())
        return (
            f"class {int(class_K[k])}: the mean embedding of its {int(num_K[k])} image(s) has NaN or Inf, or length 0: "
            "the backbone has diverged, or was never trained (--pretrained)"
        )
    table.rows.write_centres(int(class_K[0]), int(class_K[-1]) + 1, class_K, sum_KD / length_K[:, None])
    return None
