"""The planner's formulas, and the memory that a process takes."""

import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.head import measure
from benchmarks.plan_memory import CASES, planned_bytes
from partial_fc import cli
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC, Storage
from partial_fc.verbs.plan import counts as plan
from partial_fc.verbs.plan import report as plan_report
from partial_fc.verbs.plan.counts import OPTIMIZERS, Rates
from partial_fc.verbs.plan.options import PlanOptions
from tests.flat import flat_head, learn


def workload(**changed):
    usual = PlanOptions(1_000_003, gpus=8, sample_rate=1.0, state_dtype="fp32", precision="bf16")
    return replace(replace(usual, device="cpu"), **changed)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
def test_a_row_takes_what_the_head_keeps_for_it(optimizer):
    storage = Storage(torch.bfloat16, torch.float32)
    head = flat_head(103, 16, CosFace(), optimizer=OPTIMIZERS[optimizer](), storage=storage, impl="plain")
    sizes = {name: rows.numel() * rows.element_size() for name, rows in head.row_state().items()}
    planned = plan.kept_bytes(workload(classes=103, dim=16, gpus=1, optimizer=optimizer))
    assert planned["centres"] == sizes.pop("centres")
    assert planned["touched"] == sizes.pop("touched") + 103, "and one byte: whether the row exists"
    assert planned["optimizer state"] == sum(sizes.values())


@pytest.mark.parametrize("labels", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_are_those_of_a_step(dtype, labels):
    world = SingleWorld()
    head = PartialFC(50, 16, CosFace(), world=world)
    feat = torch.randn(6, 16).to(dtype).requires_grad_()
    with world.count_traffic() as traffic:
        learn(head, feat, torch.arange(6 * labels).view(6, labels))
    planned = plan.collective_bytes(workload(classes=50, dim=16, gpus=1, batch=6, labels=labels), dtype.itemsize)
    assert dict(traffic.num_bytes) == planned


def test_rings_send_what_others_need():
    assert plan.link_bytes(workload(gpus=1)) == dict.fromkeys(plan.collective_bytes(workload()), 0)
    sent, handed = plan.link_bytes(workload(gpus=8)), plan.collective_bytes(workload(gpus=8))
    assert sent["head/gather"] == 7 * handed["head/gather"]
    assert sent["head/softmax"] == 2 * 7 * handed["head/softmax"] // 8
    assert sent["head/features"] == 7 * handed["head/features"] // 8


def test_sampled_rows_are_those_that_take_part():
    head = flat_head(10_007, 8, CosFace(), sample_rate=0.07, impl="plain")
    label = torch.arange(0, 10_007, 500)
    rows = head.active_rows(label).rows
    planned = workload(classes=10_007, dim=8, gpus=1, batch=len(label), sample_rate=0.07).sampled
    assert len(rows) == pytest.approx(planned, rel=0.05)
    assert workload(classes=10, gpus=1, sample_rate=0.5).sampled == 10, "the batch has more classes than there are"


@pytest.mark.parametrize("changed", [{}, {"sample_rate": 0.1}, {"gpus": 3}, {"device": "cuda", "sample_rate": 0.01}])
def test_the_largest_class_count_just_fits(changed):
    limit = 3 << 30
    most = plan.largest_classes(workload(**changed), limit)
    together = lambda classes: sum(plan.memory(workload(**changed, classes=classes)).values())  # noqa: E731
    assert together(most) <= limit < together(most + 1)
    assert plan.largest_classes(workload(), 1000) == 0


def test_time_follows_from_the_rates():
    rates = Rates({"bf16": 1e6}, 1000.0, math.inf)
    # The CPU kernel forms a few logits once only: as many as fit into 1 GiB, in bfloat16.
    once = (1 << 30) // (2 * 1024)
    full = plan.head_seconds(workload(gpus=1), rates)
    assert full["products"] == pytest.approx((8 * 1_000_003 - 2 * once) * 1024 * 512 / 0.85e15)
    assert full["links"] == full["exponentials"] == 0
    # Centres in bf16 are read twice and written once, momentum in fp32 once each; 4 bytes say when, 8 are for targets.
    assert full["rows"] == pytest.approx(1_000_003 * (3 * 512 * 2 + 2 * 512 * 4 + 12) / 1e12)
    half = plan.head_seconds(workload(gpus=2, link_gbps=80.0), rates)
    assert half["rows"] == pytest.approx(full["rows"] / 2, rel=1e-5)
    assert half["links"] == pytest.approx(sum(plan.link_bytes(workload(gpus=2)).values()) / 1e10 + 6e-5)
    exp = plan.head_seconds(workload(gpus=1), replace(rates, gexp_per_s=10.0))
    assert exp["exponentials"] == pytest.approx((2 * 1_000_003 - once) * 1024 / 1e10)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("1e9", 10**9), ("1.5MiB", 3 << 19), ("512", 512), ("2T", 2 * 10**12)],
)
def test_sizes_are_read(text, size):
    assert plan_report.num_bytes(text) == size


ELSEWHERE = PlanOptions(10_000_000, gpus=8, device="cuda", tflops=650.0, bandwidth=4300.0, link_gbps=3600)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"memory": "4 balls"}, "80GiB"), ({"classes": 0}, "num_classes is 0"), ({"bandwidth": None}, "give both")],
)
def test_what_cannot_be_planned_is_said(changed, message):
    with pytest.raises(ValueError, match=message):
        plan_report.make(replace(ELSEWHERE, **changed))


def test_json_has_the_figures_of_the_table(monkeypatch, capsys):
    arguments = "plan --classes 1000000 --gpus 4 --device cuda --tflops 600 --bandwidth 4000 --json"
    monkeypatch.setattr(sys, "argv", ["partial-fc", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    options = PlanOptions(1_000_000, gpus=4, device="cuda", tflops=600.0, bandwidth=4000.0)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan_report.make(options)))


@pytest.mark.parametrize(("page", "number"), [("benchmarks.md", 1), ("head.md", 2)])
def test_answers_on_pages_are_those_of_the_command(page, number, capsys):
    """(those of a described machine: others measure this one)"""
    text = (Path(__file__).parents[2] / "docs" / page).read_text().replace(" \\\n        ", " ")
    blocks = re.findall(r"^    (?:\$ )?partial-fc plan (.*--tflops.*)\n((?:    (?!\$).*\n|\n)+)", text, re.MULTILINE)
    assert len(blocks) == number
    for flags, answer in blocks:
        assert not cli.run("plan", shlex.split(flags))
        printed = capsys.readouterr().out.splitlines()
        told = [line[4:] for line in answer.splitlines() if line.strip() not in ("", "...")]
        assert told
        assert not {*told} - {*printed}
        if "..." not in answer:
            assert told == [line for line in printed if line]


@pytest.mark.long
def test_a_head_takes_the_memory_that_is_planned():
    """(All cases: python -m benchmarks.plan_memory.)"""
    assert measure(CASES[0])["added_bytes"] == pytest.approx(planned_bytes(CASES[0]), rel=0.25)
