"""Several heads on the same features, on as many ranks as were launched: each is what it would be alone on its rows."""

import pytest
import torch

from partial_fc.head import CosFace, Heads, MeanSoftmax, PartialFC, RowSGD, Softmax, check_head
from tests.flat import flat_head

D, ROWS = 8, 12


def make(world, **options) -> Heads:
    shared = {"world": world, "dtype": torch.float64, "optimizer": RowSGD(0.9)}
    return Heads(
        image=flat_head(53, D, CosFace(16.0, 0.2), 0.3, name="image", **shared),
        words=flat_head(20, D, Softmax(8.0), name="words", rule=MeanSoftmax(), **shared),
        **options,
    )


def batch(world, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, labels) of all ranks. Rank 0 has no rows of `words` in step 0; nobody has any in step 1."""
    generator = torch.Generator().manual_seed(step)
    feat_GD = torch.randn(ROWS * world.size, D, generator=generator, dtype=torch.float64)
    label_G = torch.randint(0, 73 if step != 1 else 53, (len(feat_GD),), generator=generator)
    if step == 0:
        label_G[:ROWS] %= 53
    return feat_GD, label_G


def test_each_head_is_what_it_is_alone_on_its_rows(world):
    heads, alone = make(world, weights={"words": 0.5}, lr_ratios={"image": 2.0}), make(world)
    check_head(heads)
    here = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
    for step in range(4):
        feat_GD, label_G = batch(world, step)
        feat_BD, label_B = feat_GD[here].clone().requires_grad_(), label_G[here]
        loss = heads(feat_BD, label_B)
        loss.backward()
        expected, gradient_BD = 0.0, torch.zeros(ROWS, D, dtype=torch.float64)
        for name, first, stop, weight, ratio in (("image", 0, 53, 1.0, 2.0), ("words", 53, 73, 0.5, 1.0)):
            head, of_head_B = alone.parts[name], (label_B >= first) & (label_B < stop)
            if ((label_G >= first) & (label_G < stop)).any():
                rows_bD = feat_BD.detach()[of_head_B].requires_grad_()
                part = head(rows_bD, label_B[of_head_B] - first)
                (weight * part).backward()
                gradient_BD[of_head_B] = rows_bD.grad
                expected += weight * float(part.detach())
            head.step(0.1 * ratio)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-15)
        assert torch.equal(feat_BD.grad, gradient_BD)
        loss_B = heads.row_losses(heads.last_step, ROWS)
        sums = world.all_reduce(torch.stack([loss_B[label_B < 53].sum(), (label_B < 53).sum().double()]), name="t/sum")
        part = heads.last_step[0]
        assert part.name == "image"
        image = alone.parts["image"].row_losses(alone.parts["image"].last_step, world.size * ROWS, 0)
        assert float(sums[0] / sums[1]) == pytest.approx(float(image.mean()))
        heads.step(0.1)
        for name in ("image", "words"):
            assert torch.equal(heads.parts[name].centres, alone.parts[name].centres), (step, name)


def test_micro_batches_with_as_many_rows_of_each_head_are_one_batch(world):
    heads = [make(world, weights={"words": 0.5}) for _ in range(2)]
    generator = torch.Generator().manual_seed(world.rank)
    feat_BD = torch.randn(6, D, generator=generator, dtype=torch.float64)
    label_B = torch.tensor([3, 60, 5, 8, 70, 3])  # two rows of `image` and one of `words` in each half
    grads = []
    for head, parts in zip(heads, ([slice(0, 6)], [slice(0, 3), slice(3, 6)]), strict=True):
        if len(parts) > 1:
            head.prepare(label_B)
        leaf_BD = feat_BD.clone().requires_grad_()
        for part in parts:
            (head(leaf_BD[part], label_B[part]) / len(parts)).backward()
        head.step(0.1)
        grads.append(leaf_BD.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-15)
    for name in ("image", "words"):
        torch.testing.assert_close(*(head.parts[name].centres for head in heads), rtol=1e-12, atol=1e-15)


def test_several_labels_and_rows_that_have_fewer(world):
    heads, alone = make(world), make(world)
    feat_BD = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    label_BK = torch.tensor([[3, 5], [-100, 7], [60, 70], [55, -100]])
    heads(feat_BD, label_BK).backward()
    rows_bD = feat_BD.detach()[2:].requires_grad_()
    alone.parts["words"](rows_bD, torch.tensor([[7, 17], [2, -100]])).backward()
    assert torch.equal(feat_BD.grad[2:], rows_bD.grad)


def test_a_head_with_one_label_among_others_with_several_is_what_it_is_with_one(world):
    heads, alone = make(world, num_labels={"image": 1}), make(world)
    feat_BD = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    label_BK = torch.tensor([[3, -100, -100], [60, 70, -100], [7, -100, -100]])
    heads(feat_BD, label_BK).backward()
    rows_bD = feat_BD.detach()[::2].requires_grad_()
    alone.parts["image"](rows_bD, label_BK[::2, 0]).backward()
    assert torch.equal(feat_BD.grad[::2], rows_bD.grad)
    heads.step(0.1)
    alone.parts["image"].step(0.1)
    assert torch.equal(heads.parts["image"].centres, alone.parts["image"].centres)
    last = world.size - 1
    if world.rank == last:  # the others are told, too: they would wait for it
        label_BK[0, 2] = 5
    with pytest.raises(ValueError, match=rf"head 'image' have more than 1 labels \(num_labels\): 1 on rank {last}$"):
        heads(feat_BD, label_BK)


@pytest.mark.parametrize("label_BK", [[[3, 60]], [[73, 73]], [[-1, -1]]])
def test_a_label_of_no_head_or_of_two_is_refused_before_any_centre_moves(world, label_BK):
    heads = make(world)
    before = {name: head.centres.clone() for name, head in heads.tables().items()}
    with pytest.raises(ValueError, match=r"class|label"):
        heads(torch.randn(1, D, dtype=torch.float64, requires_grad=True), torch.tensor(label_BK))
    assert all(torch.equal(heads.parts[name].centres, before[name]) for name in before)


def test_clipping_is_by_the_norm_over_all_heads_and_a_skipped_step_leaves_no_trace(world):
    heads = make(world)
    feat_GD, label_G = batch(world, 2)
    here = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
    heads(feat_GD[here].requires_grad_(), label_G[here]).backward()
    squares = [float(head.gradient_square_sum()) for head in heads.parts.values()]
    assert float(heads.gradient_square_sum()) == pytest.approx(sum(squares))
    assert min(squares) > 0
    before = {name: head.centres.clone() for name, head in heads.tables().items()}
    heads.discard()
    assert all(torch.equal(heads.parts[name].centres, before[name]) for name in before)


def test_names_and_numbers_that_make_no_heads(world):
    head = PartialFC(5, D, Softmax(), world=world, name="a")
    for arguments, said in [
        ({}, "no head"),
        ({"b": head}, "has the name 'a'"),
        ({"a": head, "weights": {"c": 1.0}}, "'c'"),
        ({"a": head, "weights": {"a": -1.0}}, "-1.0"),
        ({"a": torch.nn.Linear(2, 2)}, "Linear"),
        ({"a": head, "b": PartialFC(5, D + 1, Softmax(), world=world, name="b")}, "same features"),
    ]:
        with pytest.raises(ValueError, match=said):
            Heads(**arguments)
