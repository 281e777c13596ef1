"""Inputs that are no pictures: nothing draws them, and nothing dies of their shape."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from partial_fc.comm import SingleWorld
from partial_fc.data import Loader
from partial_fc.data.sample import Sample, Source
from partial_fc.models.inputs import InputContract, Unchanged
from partial_fc.train.record import first_batch

SHAPES = [(), (1,), (5,), (4, 3), (2, 3, 4), (2, 3, 4, 5)]


class Vectors(Source):
    """A source that inherits all that it need not say."""

    num_classes = 3  # type: ignore[assignment]

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    def __len__(self) -> int:
        return 7

    def read(self, index: int) -> Sample:
        return Sample(np.full(self.shape, index, np.float32), index % 3, index)


def job_of(contract: InputContract, folder: Path) -> SimpleNamespace:
    backbone = SimpleNamespace(to_input=contract)
    return SimpleNamespace(world=SingleWorld(), backbone=backbone, class_names=None, models_root=folder)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_of_any_shape_are_loaded_and_not_drawn(shape, tmp_path):
    with Loader(Vectors(shape), lambda sample, rng, out=None: sample.data, batch_size=3) as loader:
        batch = next(loader)
    assert len(batch.input_B) == 3
    assert batch.input_B[0].numel() == np.prod(shape)
    assert len(shape) > 2 or batch.input_B.shape == (3, *shape)
    first_batch.write(job_of(Unchanged("vectors"), tmp_path), batch)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())
