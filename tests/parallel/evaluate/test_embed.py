"""Embeddings over real ranks equal one process's, to the bit."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from partial_fc import models
from partial_fc.comm import SingleWorld
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.embedding.on_ranks import embedded, why_bad
from partial_fc.embedding.sources import open_images

SIZE, N = 16, 23


@pytest.fixture
def model():
    torch.manual_seed(3)
    return EmbeddingModel(models.build("tiny", 6, SIZE), "tiny", 6, SIZE, source=Path("model.pt"))


@pytest.fixture
def source(tmp_path):
    """Two classes, equal on every rank though each writes its own; image 17 is none."""
    random = np.random.default_rng(5)
    for i in range(N):
        path = tmp_path / "data" / ("ada" if i < 9 else "bob") / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), random.integers(0, 256, (SIZE, SIZE, 3), np.uint8))
    path.with_name("17.png").write_text("none")
    return open_images([tmp_path / "data"])


@pytest.mark.parametrize("batch_size", [4, 64])  # 6 batches, the last of 3; and 1: some ranks have none
def test_equals_one_process_to_the_last_bit(world, model, source, batch_size):
    one, together = (list(embedded(model, source, w, batch_size)) for w in (SingleWorld(), world))
    for parts in (one, together):
        assert [part.first for part in parts] == np.cumsum([0, *(len(part.row_ID) for part in parts[:-1])]).tolist()
        assert np.concatenate([part.label_I for part in parts]).tolist() == [0] * 9 + [1] * 14
        assert [index for part in parts for index in part.bad] == [17]
    row_ND = np.concatenate([part.row_ID for part in together])
    np.testing.assert_array_equal(row_ND, np.concatenate([part.row_ID for part in one]))
    assert np.isnan(row_ND).any(axis=1).nonzero()[0].tolist() == [17]
    assert "17.png: no image" in why_bad(model, source, 17)


def test_a_diverged_network_is_told_on_every_rank(world, model, source):
    """Only rank 0 has one."""
    if world.rank == 0:
        model.network.get_parameter("fc.bias").data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"00\.png: its embedding has NaN or Inf"):
        list(embedded(model, source, world, 4))
    assert world.all_reduce(torch.ones(1), name="test/in_step").item() == world.size
