"""What the head says about itself: every figure against its definition."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, Shard, Storage, telemetry
from partial_fc.head.selection.sampling import Draw
from partial_fc.train.record.log import StepLine
from partial_fc.train.record.progress import Progress
from tests.flat import flat_head


def test_packed_counts_are_numpys_and_add_up():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(1000, generator=generator) / 3, torch.rand(37, generator=generator)
    edges = telemetry.COSINE_EDGES
    both = torch.cat((first, second)).clamp(-1, 1)
    packed = telemetry.pack(first.clamp(-1, 1), edges) + telemetry.pack(second, edges)
    found = telemetry.Histogram.unpack(packed, edges)
    np.testing.assert_array_equal(found.counts, np.histogram(both.double(), edges)[0])
    assert found.count == 1037
    assert found.total == pytest.approx(both.double().sum().item())
    assert found.square_total == pytest.approx(both.double().square().sum().item())
    assert found.smallest <= both.clamp(-1, 1).min() < both.clamp(-1, 1).max() <= found.largest
    assert found.counts[(edges[1:] <= found.smallest) | (edges[:-1] >= found.largest)].sum() == 0


@pytest.mark.parametrize("edges", [telemetry.COSINE_EDGES, telemetry.LENGTH_EDGES, telemetry.AGE_EDGES])
def test_nothing_falls_beside_the_bins(edges):
    values = torch.tensor([-1e9, edges[0], edges[-1], 1e12])
    found = telemetry.Histogram.unpack(telemetry.pack(values, edges), edges)
    assert found.counts[0] == 2
    assert found.counts[-1] == 2
    assert telemetry.pack(values[:0], edges).sum() == 0


def test_covered_mass_estimates_the_share_of_a_full_softmax():
    generator = torch.Generator().manual_seed(1)
    rate, num_classes = 0.1, 40_000
    logit_GC = torch.randn(16, num_classes, generator=generator).double()
    target_G = torch.linspace(0, 12, 16).double()  # from lost among the negatives to larger than all of them
    sampled = torch.randperm(num_classes, generator=generator)[: int(rate * num_classes)]
    sampled_G, all_G = logit_GC[:, sampled].exp().sum(dim=1), logit_GC.exp().sum(dim=1)
    true_G = (sampled_G + target_G.exp()) / (all_G + target_G.exp())
    denominator_G = sampled_G + target_G.exp()
    found_G = telemetry.covered_mass(denominator_G, target_G, rate)
    torch.testing.assert_close(found_G, true_G, rtol=0.1, atol=0)
    assert found_G[0] < 0.11
    assert found_G[-1] > 0.7


def test_covered_mass_with_nothing_but_the_own_class_is_one():
    target_G = torch.tensor([0.0, 600.0])
    assert telemetry.covered_mass(target_G.double().exp(), target_G, 0.1).tolist() == [1.0, 1.0]


def test_nearest_is_that_of_all_pairs():
    generator = torch.Generator().manual_seed(2)
    row_ND = torch.randn(301, 12, generator=generator)
    row_ND[5] = 0
    class_N = torch.arange(301) // 2  # two rows of each class but the last
    query_QD, class_Q = row_ND[::7], class_N[::7]
    chunks = zip(row_ND.split(50), class_N.split(50), strict=True)
    cos_Q, near_Q = telemetry.nearest(query_QD, class_Q, chunks)
    unit_ND = torch.nn.functional.normalize(row_ND)
    cos_QN = unit_ND[::7] @ unit_ND.T
    cos_QN[class_Q[:, None] == class_N[None]] = -2
    torch.testing.assert_close(cos_Q.float(), cos_QN.amax(dim=1))
    assert torch.equal(near_Q, class_N[cos_QN.argmax(dim=1)])


def test_a_class_alone_has_no_nearest():
    cos_Q, near_Q = telemetry.nearest(torch.ones(1, 4), torch.tensor([3]), [(torch.ones(2, 4), torch.tensor([3, 3]))])
    assert cos_Q.tolist() == [-torch.inf]
    assert near_Q.tolist() == [-1]


def stand_in(world, num_classes=200, dim=16, rate=0.1, sub_centres=1):
    """As much of a head as `observe` looks at: every fifth class never touched; class 3 a double of class 151, if that
    is there."""
    shard = Shard.of(num_classes, world.rank, world.size)
    centres = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(3))
    if num_classes > 151:
        centres[3] = 2.0 * centres[151]
    centres[::5] = 0
    touched = torch.arange(num_classes, dtype=torch.int32) % 5
    rows = {"centres": centres[:, None].expand(-1, sub_centres, -1), "touched": touched[:, None, None]}
    rows["touched"] = rows["touched"].expand(-1, sub_centres, -1)
    mine = slice(shard.start, shard.stop)
    target_logit = torch.zeros(6, dtype=torch.float64)
    elsewhere = torch.arange(6) // (6 // world.size) != world.rank
    return SimpleNamespace(
        world=world,
        shard=shard,
        embedding_size=dim,
        num_steps=5,
        scope="head",
        draw=Draw(num_classes, rate, 0),
        row_state=lambda: {k: t[mine, 0] if sub_centres == 1 else t[mine] for k, t in rows.items()},
        last_step={
            "target_cos": torch.where(elsewhere, 0.9, 0.3),
            "elsewhere": elsewhere,
            "target_logit": target_logit,
            "denominator": target_logit.exp() + 1.0,
        },
    )


@pytest.mark.parametrize("sub_centres", [1, 3])
def test_a_report_says_what_was_planted(sub_centres, monkeypatch):
    monkeypatch.setattr(telemetry, "NUM_QUERIES", 200)
    report = telemetry.observe(stand_in(SingleWorld(), sub_centres=sub_centres), similar=0.99)
    assert report.scalars == {
        "head/never_touched": 0.2,
        "head/similar_classes": pytest.approx(2 / 160),
        "head/covered_mass": pytest.approx(2 / 11),
    }
    assert {pair[:2] for pair in report.similar} == {(3, 151), (151, 3)}
    ages = report.histograms["head/age"]
    assert ages.counts[:4].tolist() == [0, 40, 80, 40], "1; 2 and 3; 4 steps"
    assert report.histograms["head/centre_length"].count == 160
    assert report.histograms["head/target_cosine"].total == pytest.approx(6 * 0.3)
    assert report.histograms["head/nearest_cosine"].count == 160


def test_reports_repeat_and_move_on():
    head = stand_in(SingleWorld(), num_classes=1000)
    first, second = telemetry.observe(head), telemetry.observe(head)
    assert first.scalars == second.scalars
    asked = head.num_steps
    head.num_steps = asked + 1
    third = telemetry.observe(head)
    assert third.histograms["head/nearest_cosine"].total != first.histograms["head/nearest_cosine"].total


@pytest.mark.parametrize(("rate", "sub_centres", "place"), [(0.2, 1, "device"), (1.0, 1, "host"), (0.2, 2, "device")])
def test_a_head_in_training_reports(rate, sub_centres, place):
    storage = Storage(torch.bfloat16, place=place)
    head = flat_head(500, 8, CosFace(16.0), rate, impl="plain", sub_centres=sub_centres, storage=storage)
    for step in range(3):
        feat = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
        head(feat, torch.arange(6) * 83).backward()
        head.step(0.1)
    report = telemetry.observe(head)
    touched = head.row_state()["touched"].view(500, -1)[:, 0]
    assert report.scalars["head/never_touched"] == pytest.approx((touched == 0).double().mean().item())
    assert (report.scalars["head/never_touched"] > 0.3) == (rate < 1.0)
    assert report.histograms["head/age"].counts[0] == (touched == 3).sum()
    assert report.histograms["head/target_cosine"].count == 6
    assert report.histograms["head/centre_length"].count == (touched > 0).sum()
    assert 0 < report.histograms["head/nearest_cosine"].count <= 128
    assert ("head/covered_mass" in report.scalars) == (rate < 1.0)
    assert 0 < report.scalars.get("head/covered_mass", 0.5) < 1


def test_a_head_that_has_not_trained_knows_no_neighbours():
    head = flat_head(50, 8, CosFace(16.0), impl="plain")
    head(torch.randn(6, 8).requires_grad_(), torch.arange(6))
    report = telemetry.observe(head)
    assert report.scalars == {"head/never_touched": 1.0}
    assert not report.similar


def test_histograms_reach_tensorboard(tmp_path):
    report = telemetry.observe(stand_in(SingleWorld()))
    empty = telemetry.Histogram(telemetry.AGE_EDGES, torch.zeros(32), 0.0, 0.0)
    progress = Progress(tmp_path, SingleWorld(), StepLine(1, 1, 1), 1, 0)
    progress.histograms(7, {**report.histograms, "empty": empty})
    progress.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["histograms"]) == set(report.histograms)
    (event,) = board.Histograms("head/age")
    assert event.step == 7
    assert event.histogram_value.num == 160
    assert sum(event.histogram_value.bucket) == 160
