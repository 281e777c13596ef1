"""Heads in real process groups, among DistributedDataParallel and averages."""

import json
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from partial_fc.head import HardNegatives, RowSGD
from partial_fc.verbs.train import exit_now
from tests.running import ranks
from tests.unit.head import test_module
from tests.unit.head.test_module import C, batch

pytestmark = [pytest.mark.slow, pytest.mark.long]


class Model(test_module.Model):
    def __init__(self, **options: Any):
        sampled = {"sample_rate": 0.3, "hard_negatives": HardNegatives(C, 2), "optimizer": RowSGD(0.9, 0.01)}
        super().__init__(norm=True, **sampled, **options)


def trained(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Losses, this rank's centres, and how far their average is from that of a dense table."""
    shared = DistributedDataParallel(model)
    net, rank, losses, average = torch.optim.SGD(shared.parameters(), 0.1), dist.get_rank(), [], None
    for step in range(6):
        for each in (net, optimizer):
            each.zero_grad()
        loss = shared(*batch(10 * step + rank))
        loss.backward()
        for each in (net, optimizer):
            each.step()
        if average is None:
            average = AveragedModel(shared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
            dense = model.head.centres.clone()
        average.update_parameters(shared)
        dense = 0.5 * dense + 0.5 * model.head.centres
        losses.append(loss.item())
    error = (average.module.module.head.centres - dense).abs().max().item()
    return {"losses": losses, "centres": model.head.centres.tolist(), "error": error}


def on_rank() -> None:
    early = Model()  # as Hugging Face's users make it
    optimizer = early.head.as_optimizer(lr=0.1)
    dist.init_process_group("gloo")
    late = Model(world=dist.new_group(), backbone_gradients="average")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [trained(early, optimizer), trained(late, late.head.as_optimizer(lr=0.1))]
    told = sum("they share its classes" in str(warning.message) for warning in said)
    print("\n" + json.dumps({"rank": dist.get_rank(), "told": told, "found": found}), flush=True)
    exit_now(0)


def test_shards_and_their_averages_stay_apart_under_ddp_also_of_a_head_made_before_the_process_group():
    printed = ranks(2, on_rank)
    first, second = (json.loads(line) for line in sorted(printed.splitlines()) if line.startswith('{"rank'))
    for told in (first, second):
        assert told["told"] == 1
        assert told["found"][0] == told["found"][1]
        assert told["found"][0]["error"] < 1e-5
    assert first["found"][0]["losses"] == second["found"][0]["losses"]
    assert (len(first["found"][0]["centres"]), len(second["found"][0]["centres"])) == (21, 20)
