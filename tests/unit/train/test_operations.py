"""What the loop adds to a step's operations: on a GPU each is a launch."""

import torch
from torch.nn import functional

from partial_fc.comm import SingleWorld
from partial_fc.head.cross_entropy import CrossEntropy
from partial_fc.models import iresnet
from tests.parallel.train import test_update as updates
from tests.unit.operations import Operations

CLASSES, SIDE = 100, 32


def network() -> torch.nn.Module:
    return iresnet.build("r18", CLASSES, SIDE, 3, 0.0)


def plain(foreach: bool | None, batch: updates.Batch) -> int:
    """Of the loop that everybody writes."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, foreach=foreach)
    for _ in range(2):
        with Operations() as operations:
            logits = module(batch.input_B.float().div(127.5).sub(1))
            loss = functional.cross_entropy(logits, batch.label_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    return operations.count


def test_an_update_has_hardly_more_operations_than_a_plain_loop(monkeypatch) -> None:
    """With the same network and cross-entropy. On a CPU torch's own SGD has one operation for each parameter and step,
    on a GPU one for all parameters."""
    for name, value in {"network": network, "SIDE": SIDE, "CLASSES": CLASSES}.items():
        monkeypatch.setattr(updates, name, value)
    world = SingleWorld()
    job = updates.job_of(world)
    job.head = CrossEntropy(CLASSES, world)
    (batch,) = updates.micro_batches(world, 0, 1)
    for _ in range(2):
        with Operations() as operations:
            updates.make(job, [batch])
    assert operations.count <= 0.5 * plain(None, batch)
    assert operations.count <= 1.1 * plain(True, batch)
    assert sum(operations.waits.values()) == 2  # the labels' check of the head, and the loop's own
