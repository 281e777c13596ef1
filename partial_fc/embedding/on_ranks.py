"""Embeddings of a source's images by all ranks together, in source order, one batch per rank at a time.

I images of one exchange, N all of them, D feature width, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data import BadRecord, Source
from partial_fc.data.sample import naming, still
from partial_fc.embedding.images import batches
from partial_fc.embedding.model import EmbeddingModel


@dataclass(frozen=True)
class Embedded:
    """Images first to first + I - 1. row_ID: length 1; NaN for unusable images (`bad`), whose label may be -1."""

    first: int
    row_ID: NDArray[np.float32]
    label_I: NDArray[np.int64]
    bad: list[int]


def embedded(
    model: EmbeddingModel,
    source: Source,
    world: World,
    batch_size: int = 64,
    num_threads: int | None = None,
    *,
    unit: bool = True,
    bar: str = "",
) -> Iterator[Embedded]:
    """Embeds all images in order, for every rank; bit-identical for any number of ranks, since the batches are the
    same. unit: else keep the network's length. bar: the name of a progress bar, on rank 0; "": none.

    Each piece is one all-gather of 4 D + 12 bytes an image: every rank must consume the whole iterator. Raises
    ValueError, on all ranks alike, for an embedding of length 0, NaN or Inf.
    """
    num_batches = -(-len(source) // batch_size)
    mine = (
        index
        for batch in range(world.rank, num_batches, world.size)
        for index in range(batch * batch_size, min((batch + 1) * batch_size, len(source)))
    )
    label_of: dict[int, int] = {}

    def read(index: int) -> NDArray:
        sample = source.read(index)
        label_of[index] = sample.label
        return model.prepare(still(sample))

    own = batches(mine, read, model.blank, batch_size, num_threads)
    with terminal.bar(total=len(source), unit="image", desc=bar, shown=bool(bar) and world.rank == 0) as progress:
        for first_batch in range(0, num_batches, world.size):
            first = first_batch * batch_size
            packed = torch.empty(0, model.embedding_size + 3, dtype=torch.int32)
            if first_batch + world.rank < num_batches:
                image_I3HW, bad = next(own)
                row_ID = model.embed_pixels(image_I3HW, unit=unit)
                at = first + world.rank * batch_size
                label_I = np.array([label_of.pop(at + i, -1) for i in range(len(row_ID))], np.int64)
                is_bad_I = np.array([i in bad for i in range(len(row_ID))], np.int32)
                # Bytes of several dtypes in one message.
                packed = torch.from_numpy(
                    np.concatenate((row_ID.view(np.int32), label_I[:, None].view(np.int32), is_bad_I[:, None]), axis=1)
                )
            all_I = world.all_gather(packed, name="embed/rows").numpy()
            row_ID = all_I[:, :-3].copy().view(np.float32)
            label_I = all_I[:, -3:-1].copy().view(np.int64).squeeze(1)
            bad_here = np.flatnonzero(all_I[:, -1]).tolist()
            model.check(row_ID, bad_here, [source.where(first + i) for i in range(len(row_ID))].__getitem__)
            row_ID[bad_here] = np.nan
            yield Embedded(first, row_ID, label_I, [first + i for i in bad_here])
            progress.update(len(row_ID))


def why_bad(model: EmbeddingModel, source: Source, index: int) -> str:
    """Returns the error of an unusable image on this rank."""
    try:
        sample = source.read(index)
        with naming(source, index):
            model.prepare(still(sample))
    except BadRecord as error:
        return str(error)
    return f"{source.where(index)}: another rank could not read it, this one can"
