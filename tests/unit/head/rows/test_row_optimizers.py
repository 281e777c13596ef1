"""Row optimizers, and catching up: against the dense optimizers of torch, or a dense formula written here."""

from functools import partial

import pytest
import torch

from partial_fc.head.rows import RowAdagrad, RowAdamW, RowOptimizer, RowSGD, RowTable, Storage, catch_up

L, D = 37, 6
EXACT = Storage(torch.float64)


class DenseRowAdagrad(torch.optim.Optimizer):
    def __init__(self, params, lr, eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                s = self.state[w]
                grad = w.grad + group["weight_decay"] * w.data
                s["a"] = s.get("a", 0.0) + (grad**2).mean(1, keepdim=True)
                w.data = w.data - group["lr"] * grad / (s["a"].sqrt() + group["eps"])


PAIRS = [
    (RowSGD(0.9, 0.01), partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)),
    (RowSGD(0.0, 0.0), torch.optim.SGD),
    (RowSGD(0.8, 0.02, nesterov=True), partial(torch.optim.SGD, momentum=0.8, weight_decay=0.02, nesterov=True)),
    (RowAdamW(weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
    (RowAdamW(0.7, 0.9, 1e-3, 0.0), partial(torch.optim.AdamW, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.0)),
    (RowAdagrad(), DenseRowAdagrad),
    (RowAdagrad(weight_decay=0.1), partial(DenseRowAdagrad, weight_decay=0.1)),
]


def centres(optimizer: RowOptimizer, storage: Storage = EXACT, **options) -> RowTable:
    return RowTable(5, L, D, 3, optimizer, storage, "cpu", **options)


def rates(num_steps: int) -> list[float]:
    return [0.05 * (1 - i / num_steps) + 0.001 for i in range(num_steps)]


def train(ours: RowTable, dense, parameter, num_steps: int, sampled: bool, start: int = 0) -> None:
    """The same random gradients for both; the dense one gets zeros for the rows that take no part."""
    generator = torch.Generator().manual_seed(start)
    for step, lr in enumerate(rates(50)[start : start + num_steps], start):
        row_S = None
        if sampled:
            taken = torch.rand(L, generator=generator) < (0.0 if step == 7 else 0.15)
            taken[-1] = False  # one that never takes part
            row_S = taken.nonzero().squeeze(1)
        grad = torch.randn(L, D, dtype=torch.float64, generator=generator)
        ours.fetch(row_S, step)
        for part in (slice(0, 3), slice(3, L)) if row_S is None else (slice(0, 2), slice(2, max(2, len(row_S)))):
            row_K = None if row_S is None else row_S[part]
            stop = part.stop if row_S is None else part.start + len(row_K)
            ours.update(row_K, part.start, stop, (grad[part] if row_S is None else grad[row_K]).clone(), lr, step)
        parameter.grad = grad.clone()
        if row_S is not None:
            parameter.grad[~taken] = 0
        for group in dense.param_groups:
            group["lr"] = lr
        dense.step()


@pytest.mark.parametrize(("optimizer", "theirs"), PAIRS, ids=str)
def test_equal_the_dense_ones_where_all_rows_take_part(optimizer, theirs):
    ours = centres(optimizer)
    parameter = torch.nn.Parameter(ours.all_rows().clone())
    train(ours, theirs([parameter], lr=1.0), parameter, 12, sampled=False)
    torch.testing.assert_close(ours.centre_LD, parameter.data, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("optimizer", "theirs"), PAIRS, ids=str)
def test_exact_catch_up_equals_the_dense_ones_over_fifty_sampled_steps(optimizer, theirs):
    ours = centres(optimizer, catch_up="exact")
    parameter = torch.nn.Parameter(centres(optimizer).all_rows().clone())
    train(ours, theirs([parameter], lr=1.0), parameter, 50, sampled=True)
    stored = ours.all_rows().clone()
    torch.testing.assert_close(ours.centres_now(), parameter.data, rtol=1e-9, atol=1e-13)
    assert torch.equal(ours.centre_LD, stored), "a look changes nothing"
    ours.fetch(None, 50)
    torch.testing.assert_close(ours.centre_LD, parameter.data, rtol=1e-9, atol=1e-13)
    without = centres(optimizer)
    train(without, theirs([parameter], lr=1.0), parameter, 50, sampled=True)
    still = isinstance(optimizer, RowAdagrad | RowSGD) and not optimizer.weight_decay
    assert torch.equal(without.all_rows(), ours.centre_LD) == still, "and it is the catching up that does it"


@pytest.mark.parametrize("optimizer", [RowSGD(0.9, 0.01, nesterov=True), RowAdamW()], ids=str)
def test_catch_up_goes_on_after_a_restart(optimizer):
    whole, first, second = (centres(optimizer, catch_up="exact") for _ in range(3))
    for ours, start, stop in ((whole, 0, 20), (whole, 20, 40), (first, 0, 20)):
        parameter = torch.nn.Parameter(torch.zeros(L, D, dtype=torch.float64))
        train(ours, torch.optim.SGD([parameter], lr=1.0), parameter, stop - start, True, start)
    second.load_schedule_state(first.schedule_state())
    second.load_row_state({name: t.clone() for name, t in first.row_state().items()})
    train(second, torch.optim.SGD([parameter], lr=1.0), parameter, 20, True, 20)
    for ours in (whole, second):
        ours.fetch(None, 40)
    for name, tensor in whole.row_state().items():
        torch.testing.assert_close(second.row_state()[name], tensor, rtol=1e-14, atol=0)


CLOSED = [RowSGD(), RowSGD(0.9, 0.01, nesterov=True), RowAdamW(), RowAdamW(0.8, 0.99, eps=1e-5, weight_decay=0.05)]


def lagging(optimizer, num_steps, generator):
    """Rows of moments of all sizes, above and far below eps, that have missed 1 to all but the first steps."""
    since_K = torch.randint(0, num_steps, (300,), generator=generator).sort().values
    size_KD = 10.0 ** torch.randint(-12, 0, (300, D), generator=generator)
    wide = {
        n: torch.randn(300, D, generator=generator) * size_KD for n, w in optimizer.state_widths().items() if w == "row"
    }
    if isinstance(optimizer, RowAdamW):
        wide = {"first_moment": wide["first_moment"], "second_moment": wide["second_moment"] ** 2 + size_KD**2 / 1e3}
        wide["num_steps"] = since_K[:, None].float()
        wide["num_steps"][::7] -= 1  # as of a row that has rested for a step
        since_K[:3] = 0  # never took part
        wide = {name: t.index_fill(0, torch.arange(3), 0.0) for name, t in wide.items()}
    return since_K, torch.randn(300, D, generator=generator) / 20, wide


@pytest.mark.parametrize("optimizer", CLOSED, ids=str)
@pytest.mark.parametrize("how", ["C++", "C++ in place", "restarted"])
def test_the_closed_form_is_what_the_steps_make(optimizer, how):
    """For rows that missed the first steps, and for others; in float32, beside all steps in float64."""
    num_steps, generator = 700, torch.Generator().manual_seed(3)
    rates = [0.01 * (1 + i % 7) for i in range(num_steps)]
    ours = catch_up.make(optimizer, torch.device("cpu"), rates[: num_steps if how == "restarted" else 450])
    for lr in rates[len(ours.rates) :]:
        ours.record(lr)
    since_K, centre_KD, state = lagging(optimizer, num_steps, generator)
    before, exact = centre_KD.double(), {name: t.double() for name, t in state.items()}
    after = before.clone()
    catch_up.CatchUp(optimizer, rates, 0).apply(after, exact, since_K)
    tables = {"centres": centre_KD, **state, "touched": since_K.int()[:, None]}
    if how == "C++ in place":
        order = torch.randperm(300, generator=generator)
        tables = {name: t[order].contiguous() for name, t in tables.items()}
        done = ours.in_place(tables, torch.arange(300))
        tables = {name: t[order.argsort()] for name, t in tables.items()}
        keep = (tables["touched"] == num_steps).squeeze(1)
        assert done == keep.all()
        assert keep.sum() == {CLOSED[2]: 138, CLOSED[3]: 3}.get(optimizer, 300)  # AdamW's first steps are left
    else:
        ours.apply(centre_KD, state, since_K)
        keep = torch.ones(300, dtype=torch.bool)
    error, moved = (tables["centres"].double() - after).abs(), (after - before).abs()
    assert (error <= 4e-6 * (moved + before.abs()))[keep].all()  # as 700 steps in float32 have it
    for name in state:
        torch.testing.assert_close(tables[name][keep].double(), exact[name][keep], rtol=3e-5, atol=1e-30)


def test_catch_up_says_what_it_misses():
    ours = centres(RowSGD(), catch_up="exact")
    row = torch.tensor([3])
    ours.fetch(row, 0)
    ours.update(row, 0, 1, torch.ones(1, D), 0.1, 0)
    with pytest.raises(ValueError, match="step 5 after 1 steps"):
        ours.fetch(row, 5)
    with pytest.raises(ValueError, match=r"update of step 2 with learning rate 0\.1 after 1 steps"):
        ours.update(row, 0, 1, torch.ones(1, D), 0.1, 2)
    with pytest.raises(ValueError, match="one rate for all"):
        ours.update(row, 0, 1, torch.ones(1, D), 0.2, 0)
    with pytest.raises(ValueError, match="go on with those settings"):
        centres(RowSGD(0.5), catch_up="exact").load_schedule_state(ours.schedule_state())
    state = ours.schedule_state()
    assert ours.load_schedule_state(centres(RowSGD()).schedule_state()), "rows that rested go on resting"
    assert ours.schedule_state() == {}
    assert not ours.load_schedule_state(state)
    assert ours.schedule_state() == state


@pytest.mark.parametrize("optimizer", [RowSGD(), RowAdamW(), RowAdagrad(weight_decay=0.1)], ids=str)
def test_without_catch_up_a_row_lives_only_in_the_steps_that_touch_it(optimizer):
    """Touched in every second step, a row ends where one ends that knows only those steps."""
    sparse, dense = centres(optimizer), centres(optimizer)
    grads = torch.randn(6, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, other = torch.tensor([0, 2]), torch.tensor([1])
    for step, grad in enumerate(grads):
        row_S = rows if step % 2 else other
        sparse.fetch(row_S, step)
        sparse.update(row_S, 0, len(row_S), grad[row_S], 0.1, step)
    for step, grad in enumerate(grads[1::2]):
        dense.fetch(rows, step)
        dense.update(rows, 0, 2, grad[rows], 0.1, step)
    for name, tensor in sparse.row_state().items():
        if name != "touched":
            assert torch.equal(tensor[rows], dense.row_state()[name][rows])
            assert not tensor[3:].any()
    assert sparse.row_state()["touched"].flatten().tolist() == [6, 5, 6] + [0] * (L - 3)


def test_settings_that_make_no_sense_are_refused():
    for make in (
        lambda: RowSGD(momentum=1.0),
        lambda: RowSGD(weight_decay=-1.0),
        lambda: RowSGD(0.0, nesterov=True),
        lambda: RowAdamW(beta2=1.5),
        lambda: RowAdamW(eps=float("nan")),
        lambda: RowAdagrad(weight_decay=-0.1),
        lambda: centres(RowSGD(), catch_up="closed"),
    ):
        with pytest.raises(ValueError, match=r"expected|plain SGD"):
            make()
