"""Ranks together see what one process sees."""

import torch

from partial_fc.comm import SingleWorld
from partial_fc.head import telemetry
from tests.unit.head.test_telemetry import stand_in


def test_a_report_is_that_of_one_process(world):
    # Everything fits into the draws, so that nothing depends on which rows they take.
    ours = telemetry.observe(stand_in(world, num_classes=101), similar=0.1)
    alone = telemetry.observe(stand_in(SingleWorld(), num_classes=101), similar=0.1)
    assert ours.scalars == alone.scalars
    for name, found in alone.histograms.items():
        assert torch.equal(ours.histograms[name].counts, found.counts), name
        torch.testing.assert_close(ours.histograms[name].total, found.total)
    assert [pair[:2] for pair in ours.similar] == [pair[:2] for pair in alone.similar]
    assert len(ours.similar) > 40


def test_more_ranks_than_classes(world):
    report = telemetry.observe(stand_in(world, num_classes=2))
    assert report.histograms["head/age"].count == 1
    assert not report.similar
