"""Sample rates and margins that change during training, on as many ranks as were launched."""

import os
from functools import partial

import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.head import ArcFace, CosFace, HardNegatives, PartialFC, Steps, Storage, reference
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.rows import RowAdamW, RowSGD
from tests.flat import flat_head
from tests.parallel.head.test_head_kinds import CLASSES, D, batch_of, check_any_number_of_ranks, train

IMPLS = [("plain", torch.float64), ("cpu", torch.float32)]
if os.environ.get("TRITON_INTERPRET") == "1":
    IMPLS = [("triton", torch.float32)]
RATES = {0: 0.3, 2: 0.6, 3: 0.2, 6: 0.8}
MARGINS = Steps({0: CosFace(16.0, 0.0), 1: CosFace(16.0, 0.2), 4: CosFace(16.0, 0.4)})


@pytest.mark.parametrize(
    "options",
    [
        {"rates": RATES | {6: 1.0}},
        {"quota": "insightface"},
        {"rates": RATES | {6: 1.0}, "sub_centres": 2, "interclass_filtering_threshold": 0.3},
        {"margins": Steps({0: AdaFace(16.0, 0.1), 3: AdaFace(16.0, 0.4)})},
        {"margins": Steps({0: ArcFace(16.0, 0.1), 3: ArcFace(16.0, 0.4)}), "hard": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("impl", "dtype"), IMPLS, ids=[impl for impl, _ in IMPLS])
def test_each_step_is_that_of_a_head_made_with_its_rate_and_margin(world, impl, dtype, options):
    """To the bit: loss, gradients, what the step makes of the centres. They rest: catch-up multiplies its steps up in
    another order after a load, which is another last digit of a float64."""
    options = {"catch_up": "none", **options}
    rates, margins = Steps(options.pop("rates", RATES)), options.pop("margins", MARGINS)
    hard = options.pop("hard", 0)
    if hard:
        options["hard_negatives"] = HardNegatives(CLASSES, hard, every=2)
    head = flat_head(CLASSES, D, margins, rates, world, 3, impl=impl, dtype=dtype, **options)
    for step in range(8):
        if hard:
            options["hard_negatives"] = HardNegatives(CLASSES, hard, every=2)
        plain = flat_head(CLASSES, D, margins.at(step), rates.at(step), world, 3, impl=impl, dtype=dtype, **options)
        plain.load_state_dict(head.state_dict())
        assert plain.num_steps == step
        assert head.margin == plain.margin
        feat_GD, label_G, part = batch_of(world, seed=step)
        seen = []
        for one in (head, plain):
            feat_BD = feat_GD[part].to(dtype).requires_grad_()
            loss = one(feat_BD, label_G[part])
            loss.backward()
            one.step(0.1)
            seen.append((loss.detach(), feat_BD.grad, one.centres.clone()))
        assert all(map(torch.equal, *seen)), step


DENSE = [
    (RowSGD(0.9, 0.01), partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)),
    (RowAdamW(weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
]


@pytest.mark.parametrize(("optimizer", "theirs"), DENSE, ids=["sgd", "adamw"])
def test_caught_up_centres_are_the_dense_optimizers(world, optimizer, theirs):
    """Rates that rise, fall, and take in every class for a while, whose rows lag behind before."""
    rates = Steps({0: 0.1, 5: 0.4, 9: 1.0, 12: 0.2})
    head = flat_head(CLASSES, D, MARGINS, rates, world, 3, optimizer, dtype=torch.float64, catch_up="exact")
    dense = flat_head(CLASSES, D, MARGINS, rates, SingleWorld(), 3, dtype=torch.float64, catch_up="none")
    centre_CD = torch.nn.Parameter(dense.centres.clone())
    stepper = theirs([centre_CD], lr=1.0)
    for step in range(20):
        feat_GD, label_G, part = batch_of(world, seed=step)
        lr = 0.05 * (1 + step % 3)
        head(feat_GD[part].requires_grad_(), label_G[part]).backward()
        head.step(lr)
        dense.num_steps = step
        rows = dense.active_rows(label_G).rows
        active_S = torch.arange(CLASSES) if rows is None else rows
        assert (len(active_S) == CLASSES) == (rates.at(step) == 1.0)
        stepper.param_groups[0]["lr"] = lr
        stepper.zero_grad()
        reference.loss(feat_GD, label_G, centre_CD, MARGINS.at(step), active_S).backward()
        stepper.step()
    centres = world.all_gather(head.centres, name="t/centres")
    torch.testing.assert_close(centres, centre_CD.data, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("catch_up", ["none", "exact"])
def test_the_number_of_ranks_does_not_change_it(world, catch_up):
    rates = Steps({0: 0.3, 3: 1.0, 5: 0.5})
    check_any_number_of_ranks(world, range(8), batch_of, MARGINS, rates, optimizer=RowAdamW(), catch_up=catch_up)


def test_a_run_goes_on_to_the_bit_from_every_step(world):
    def new() -> PartialFC:
        options = {"impl": "plain", "catch_up": "exact", "storage": Storage(torch.bfloat16)}
        return flat_head(CLASSES, D, MARGINS, Steps({0: 0.3, 2: 0.6, 3: 0.2, 5: 1.0}), world, 3, **options)

    with new() as head:
        whole = train(head, world, range(8))
        for stop in (3, 5, 6):
            with new() as first, new() as rest:
                begun = train(first, world, range(stop))
                state = {name: t.clone() for name, t in first.state_dict().items()}
                rest.load_state_dict(state)
                assert torch.equal(torch.cat([begun, train(rest, world, range(stop, 8))]), whole)
                assert torch.equal(rest.centres, head.centres)
