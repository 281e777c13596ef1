"""Classification over real ranks: every sample once, the numbers of one process to the last bit."""

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data import BadRecord, Synthetic
from partial_fc.data.sample import LabelOutOfRange, Sample
from partial_fc.data.transform import as_stored
from partial_fc.evaluate.classification import Classification

C, N, SIDE = 7, 45, 6


class Images(Synthetic):
    """Noise of one mean for each class; all ranks have the same."""

    def __init__(self, num_classes: int = C, bad: dict[int, Exception] | None = None):
        super().__init__(num_classes, SIDE, N)
        self.bad = bad or {}

    def read(self, index: int) -> Sample:
        if index in self.bad:
            raise self.bad[index]
        label = index % self.num_classes
        image = np.random.default_rng(index).normal(30 * label, 60, (SIDE, SIDE, 1))
        return Sample(image.clip(0, 255).astype(np.uint8), label, index)


def network(num_classes: int = C):
    """What it gives for an image may depend on the batch in the last bits."""
    torch.manual_seed(11)
    layers = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
    last = torch.nn.Linear(8 * (SIDE - 2) ** 2, num_classes)
    return lambda input_B: last(layers(input_B.float() / 128 - 1)).detach()


def all_of(one: Classification, forward, world) -> tuple:
    values = dict(one.run(forward, world))
    return values, one.num_correct, one.confusion_CC.tolist()


@pytest.mark.parametrize("batch_size", [4, 45])  # 12 batches, and 1: some ranks have none
def test_equals_one_process_to_the_last_bit(world, batch_size):
    together = all_of(Classification("test", Images(), as_stored, batch_size, top=3), network(), world)
    alone = all_of(Classification("test", Images(), as_stored, batch_size, top=3), network(), SingleWorld())
    assert together == alone


def test_the_numbers_are_those_of_every_sample_once(world):
    samples = [Images().read(index) for index in range(N)]
    logit_NC = network()(torch.tensor(np.stack([sample.image for sample in samples])).movedim(-1, 1)).double()
    label_N, order_NC = torch.tensor([sample.label for sample in samples]), logit_NC.argsort(1, descending=True)
    confusion = np.zeros((C, C), np.int64)
    np.add.at(confusion, (label_N.numpy(), order_NC[:, 0].numpy()), 1)
    wrong_N = order_NC[:, 0] != label_N
    values, num_correct, found = all_of(Classification("test", Images(), as_stored, 4, top=3), network(), world)
    assert values == {
        "test/accuracy": int((~wrong_N).sum()) / N,
        "test/top3": int((order_NC[:, :3] == label_N[:, None]).any(1).sum()) / N,
    }
    assert found == confusion.tolist()
    one = Classification("test", Images(), as_stored, 4)
    list(one.run(network(), world))
    assert one.loss == pytest.approx(torch.nn.functional.cross_entropy(logit_NC, label_N).item(), abs=1e-6)
    assert 0 < num_correct == int((~wrong_N).sum()) < N


def test_more_classes_than_a_table_has_room_for(world):
    one = Classification("test", Images(1200), as_stored, 4)
    assert dict(one.run(network(1200), world)).keys() == {"test/accuracy", "test/top5"}
    assert one.confusion_CC is None


def in_step(world) -> bool:
    """Whether the next collective works."""
    return world.all_reduce(torch.ones(1), name="test/in_step").item() == world.size


@pytest.mark.parametrize("error", [BadRecord("sample 2 is wrong"), LabelOutOfRange("sample 2 is wrong", C)])
def test_a_sample_that_cannot_be_used_is_an_error_on_all_ranks(world, error):
    """It is in the first batch, which only rank 0 sees."""
    with pytest.raises(ValueError, match=r"sample 2 is wrong" if world.rank == 0 else "test: another rank"):
        list(Classification("test", Images(bad={2: error}), as_stored, 4).run(network(), world))
    assert in_step(world)


def test_an_output_that_is_not_finite_is_an_error_on_all_ranks(world):
    forward = network()

    def sick(input_B):
        logit_BC = forward(input_B)
        logit_BC[1, 2] = torch.nan if world.rank == 0 else logit_BC[1, 2]
        return logit_BC

    with pytest.raises(FloatingPointError, match=rf"test: .* {N} samples"):
        list(Classification("test", Images(), as_stored, 5).run(sick, world))
    assert in_step(world)


def test_the_first_samples_alone(world):
    limited = Classification("test", Images(), as_stored, 4, top=3, limit=10)
    values, num_correct, confusion = all_of(limited, network(), world)
    image_NHWC = np.stack([Images().read(index).image for index in range(10)])
    prediction_N = network()(torch.tensor(image_NHWC).movedim(-1, 1)).argmax(1)
    assert num_correct == int((prediction_N == torch.arange(10) % C).sum())
    assert values["test/accuracy"] == num_correct / 10
    assert np.sum(confusion) == 10
