"""The stream of batches: order, resume, damage, threads."""

import threading
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from partial_fc.data import BadRecord, Batch, Loader, RecordSource, Synthetic
from partial_fc.data.npy import read_weights
from partial_fc.data.order import PerEpoch, sample_order
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sample import Sample
from partial_fc.data.transform import Augment, SquareImage, mirror


class Numbers(Synthetic):
    """Sample i is an image full of i, unless it is bad."""

    alike = False

    def __init__(self, num_samples: int, bad: tuple[int, ...] = (), error: type[Exception] = BadRecord) -> None:
        super().__init__(num_samples, 4)
        self.bad, self.error = bad, error

    def read(self, index: int) -> Sample:
        if index in self.bad:
            raise self.error(f"sample {index} is damaged")
        return Sample(np.full((4, 4, 3), index % 256, np.uint8), index, index)


def loader_of(source: Numbers | RecordSource, size: int = 4, augment: Augment | None = None, **more: Any) -> Loader:
    return Loader(source, SquareImage(size, augment), **more)


def take(loader: Loader, count: int) -> list[Batch]:
    with loader:
        return [next(loader) for _ in range(count)]


def keys(batches: list[Batch]) -> list[int]:
    return torch.cat([batch.key_B for batch in batches]).tolist()


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_order_does_not_depend_on_the_number_of_ranks(world_size: int, batch_size: int) -> None:
    ranks = [
        take(loader_of(Numbers(31), batch_size=batch_size, rank=rank, world_size=world_size), 7)
        for rank in range(world_size)
    ]
    together = [key for step in zip(*ranks, strict=True) for key in keys(list(step))]
    assert together == sample_order(torch.arange(7 * 12), 31, seed=0).tolist()
    position = [batch.position_B for step in zip(*ranks, strict=True) for batch in step]
    assert torch.equal(torch.cat(position), torch.arange(7 * 12))  # type: ignore[arg-type]


def test_pixels_labels_keys_and_layout() -> None:
    (batch,) = take(loader_of(Numbers(10), batch_size=5), 1)
    assert batch.input_B.shape == (5, 3, 4, 4)
    assert batch.input_B.dtype == torch.uint8
    assert batch.input_B.is_contiguous(memory_format=torch.channels_last)
    assert batch.label_B.dtype == batch.key_B.dtype == torch.int64
    assert (batch.input_B == batch.label_B[:, None, None, None]).all()
    assert batch.epoch == 0.5


def test_a_sample_has_the_weight_of_its_record() -> None:
    """Of the one that takes a damaged one's place, too."""
    weight_N = np.arange(10, dtype=np.float32) / 4
    batches = take(loader_of(Numbers(10, bad=(3,)), batch_size=5, weights=weight_N), 6)
    for batch in batches:
        assert batch.weight_B is not None
        assert batch.weight_B.dtype == torch.float64
        assert torch.equal(batch.weight_B, batch.key_B / 4)
    assert 3 not in keys(batches)
    assert take(loader_of(Numbers(10), batch_size=5), 1)[0].weight_B is None


@pytest.mark.parametrize(
    ("weight_N", "words"),
    [
        (np.ones(9), r"float64 \(9,\); expected floating numbers, \(10,\)"),
        (np.ones((10, 1)), r"\(10, 1\); expected"),
        (np.ones(10, np.int64), "int64"),
        (np.where(np.arange(10) == 7, -0.5, 1.0), r"the weight of record 7 is -0\.5; expected finite numbers"),
        (np.where(np.arange(10) > 7, np.nan, 1.0), "the weight of record 8 is nan"),
    ],
)
def test_weights_that_make_no_sense_are_named(tmp_path: Path, weight_N: NDArray[Any], words: str) -> None:
    path = tmp_path / "weights.npy"
    np.save(path, weight_N)
    with pytest.raises(ValueError, match=f"{path}.*{words}"):
        read_weights(path, 10)


def noise(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    return image ^ rng.integers(0, 256, image.shape, np.uint8)


def test_resume_by_position_is_exact_for_any_number_of_ranks_and_threads() -> None:
    whole = take(loader_of(Numbers(50), batch_size=6, augment=noise, num_workers=1), 20)
    with loader_of(Numbers(50), batch_size=6, augment=noise, num_workers=16) as loader:
        for _ in range(9):
            next(loader)
        position = loader.position
    assert position == 54
    rest = [
        take(loader_of(Numbers(50), batch_size=3, augment=noise, position=position, rank=rank, world_size=2), 11)
        for rank in range(2)
    ]
    for expected, left, right in zip(whole[9:], *rest, strict=True):
        assert torch.equal(expected.input_B, torch.cat((left.input_B, right.input_B)))
        assert torch.equal(expected.label_B, torch.cat((left.label_B, right.label_B)))
        assert expected.position == left.position
        assert expected.epoch == right.epoch


def test_bad_records_are_named_and_replaced_alike_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    source = Numbers(20, bad=(3, 11, 12))
    one = take(loader_of(source, batch_size=8, num_workers=3), 10)
    named = [record.message for record in caplog.records if "sample 11 is damaged" in record.message]
    assert named == [named[0]]  # once, however often it comes by
    assert not set(keys(one)) & set(source.bad)
    order = sample_order(torch.arange(80), 20, seed=0).tolist()
    assert all(got == meant for got, meant in zip(keys(one), order, strict=True) if meant not in source.bad)
    halves = [take(loader_of(source, batch_size=4, rank=rank, world_size=2), 10) for rank in range(2)]
    assert keys(one) == [key for step in zip(*halves, strict=True) for key in keys(list(step))]


def test_too_many_bad_records() -> None:
    source = Numbers(20, bad=(3, 11, 12))
    loader = loader_of(source, batch_size=20, max_bad_records=2, num_workers=1)
    with pytest.raises(ValueError, match=r"(?s)3 bad records on rank 0, at most 2 .*sample (3|11|12) is damaged"):
        next(loader)


def test_no_thread_searches_for_ever_when_all_records_are_bad() -> None:
    loader = loader_of(Numbers(3, bad=(0, 1, 2)), batch_size=1, num_workers=4, prefetch=20)
    with pytest.raises(ValueError, match="3 bad records"):
        next(loader)
    assert not loader_threads()


def test_other_errors_reach_the_consumer_and_end_the_threads() -> None:
    loader = loader_of(Numbers(20, bad=(3,), error=OSError), batch_size=20)
    with pytest.raises(OSError, match="sample 3 is damaged"):
        next(loader)
    assert not loader_threads()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_close_waits_for_one_image_not_for_the_batches() -> None:
    started = threading.Event()
    images = []

    def slow(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        images.append(1)
        started.set()
        time.sleep(0.01)
        return image

    loader = loader_of(Numbers(1000), batch_size=1000, augment=slow, num_workers=2)

    def consume() -> None:
        with pytest.raises(RuntimeError, match=r"closed|shutdown"):  # waiting for a batch, or starting one
            next(loader)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert started.wait(5)
    loader.close()
    consumer.join(5)
    assert not loader_threads()
    assert len(images) < 100
    loader.close()  # twice is fine


def test_a_transform_that_gives_another_shape_or_type_is_an_error_that_names_the_sample() -> None:
    for change in (lambda image: image / 255, lambda image: image[1:]):
        odd = loader_of(
            Numbers(5),
            augment=lambda image, _, change=change: change(image) if image.max() == 3 else image,
            batch_size=5,
            num_workers=0,  # with threads any batch may be the first, and begin with the odd one
        )
        with pytest.raises(ValueError, match=r"sample 3.*one shape and dtype"):
            next(odd)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_update_ends_where_its_epoch_does(num_workers: int) -> None:
    """... with an order of epochs; ranks have equally many, and the last batch of an epoch may be smaller."""
    ranks = []
    for rank in range(2):
        order = PerEpoch(21, seed=1)
        with Loader(
            Numbers(21), SquareImage(4), order, batch_size=4, rank=rank, world_size=2, num_workers=num_workers
        ) as loader:
            ranks.append([loader.next_update(2) for _ in range(4)])
    for updates in ranks:
        assert [[len(batch.label_B) for batch in update] for update in updates] == [[4, 4], [3], [4, 4], [3]]
        assert [[batch.num_global for batch in update] for update in updates] == [[8, 8], [6], [8, 8], [6]]
        assert [update[-1].ends_epoch for update in updates] == [False, True, False, True]
        assert [update[-1].position for update in updates] == [16, 21, 37, 42]
    for update in (0, 2):
        seen = [key for updates in ranks for batches in updates[update : update + 2] for key in keys(batches)]
        assert set(seen) == set(range(21))
        assert len(seen) == 22


def moving(position: int = 0) -> Loader:
    return Loader(
        Synthetic(7, 8, 50), SquareImage(8, mirror), batch_size=3, rank=1, world_size=2, seed=5, position=position
    )


@pytest.mark.parametrize("position", [0, 12, 61])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_seek(position, taken):
    """It then gives what a new one gives that starts there."""
    with moving() as moved, moving(position) as fresh:
        for _ in range(taken):
            next(moved)
        moved.seek(position)
        assert moved.position == position
        for _ in range(4):
            one, other = next(moved), next(fresh)
            assert torch.equal(one.input_B, other.input_B)
            assert torch.equal(one.key_B, other.key_B)
            assert (one.position, one.epoch) == (other.position, other.epoch)
        assert moved.position == position + 4 * 6


def test_samples_decoded_together_are_those_decoded_one_by_one(tmp_path: Path) -> None:
    """... of a set in which not all can be: another size, another format, damage."""
    colours = np.random.default_rng(0).integers(0, 256, (40, 9, 9, 3), np.uint8)
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key, colour in enumerate(colours):
            ending = ".png" if key % 4 == 1 else ".jpg"
            content = cv2.imencode(ending, colour[: 8 - key % 2])[1].tobytes() if key % 5 else b"rubbish"
            writer.write(key, pack([key, 0.0] if key % 3 else key, content))
    square = SquareImage(8, mirror)

    def plain(sample: Sample, rng: np.random.Generator, out: NDArray[Any] | None = None) -> NDArray[Any]:
        return square(sample, rng, out)

    several = Loader(RecordSource(tmp_path), square, batch_size=16, num_workers=2)
    single = Loader(RecordSource(tmp_path), plain, batch_size=16, num_workers=0)
    for mine, other in zip(take(several, 8), take(single, 8), strict=True):
        assert torch.equal(mine.input_B, other.input_B)
        assert torch.equal(mine.label_B, other.label_B)
        assert torch.equal(mine.key_B, other.key_B)
    assert len(several.builder.bad) == len(single.builder.bad) == 8
