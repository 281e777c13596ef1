"""The embeddings of a source's images as one array on every rank.

N images, D feature width.
"""

import numpy as np
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.data import Source
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.embedding.on_ranks import embedded, why_bad


def embed_together(
    model: EmbeddingModel, source: Source, world: World, batch_size: int, name: str, unit: bool = True
) -> NDArray[np.float32]:
    """(N, D), the same bits for any number of ranks. unit: of length 1, else as long as the network gives them. Raises
    ValueError, on all ranks alike, for an image that cannot be used or has no embedding."""
    row_ND = np.empty((len(source), model.embedding_size), np.float32)
    with terminal.bar(total=len(source), desc=name, unit="image", shown=world.rank == 0) as bar:
        for part in embedded(model, source, world, batch_size, unit=unit):
            if part.bad:
                raise ValueError(f"{name}: {why_bad(source, part.bad[0])} (image {part.bad[0]} of {len(source)})")
            row_ND[part.first : part.first + len(part.row_ID)] = part.row_ID
            bar.update(len(part.row_ID))
    return row_ND
