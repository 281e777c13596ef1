"""Top-k, logits and centres by class over W ranks, beside one dense product."""

import pytest
import torch
from torch.nn.functional import normalize

from partial_fc.head import CosFace, PartialFC, Shard
from tests.flat import flat_head
from tests.unit.thread_world import in_world

D = 7


def head_of(world, num_classes: int, **options) -> PartialFC:
    return flat_head(num_classes, D, CosFace(scale=8.0), world=world, **{"dtype": torch.float64} | options)


def features(rank: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def dense_cosines(num_classes: int, feat_BD: torch.Tensor, **options) -> torch.Tensor:
    with head_of(None, num_classes, **options) as head:
        centre_CMD = normalize(head.centres.reshape(num_classes, -1, D), dim=2)
        return (normalize(feat_BD, dim=1) @ centre_CMD.flatten(0, 1).T).unflatten(1, (num_classes, -1)).amax(2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("num_classes", "k", "options"), [
    (1, 1, {}), (2, 2, {}), (11, 3, {}), (101, 100, {}), (50, 5, {"sub_centres": 3}), (40, 4, {"sample_rate": 0.1}),
])  # fmt: skip
@pytest.mark.parametrize("impl", ["plain", "cpu"])
def test_topk_is_that_of_the_dense_product(world_size, num_classes, k, options, impl):
    """Also where ranks have fewer classes than k, other numbers of rows, or none."""
    kernel = {"impl": "plain"} if impl == "plain" else {"impl": "cpu", "dtype": torch.float32}

    def on_rank(world):
        with head_of(world, num_classes, **options, **kernel) as head:
            return head.topk(features(world.rank, 4 - 2 * world.rank), k)

    for rank, (cosine_BK, class_BK) in enumerate(in_world(world_size, on_rank)):
        expected = dense_cosines(num_classes, features(rank, 4 - 2 * rank), **options).topk(k)
        error = 1e-12 if impl == "plain" else 1e-6
        torch.testing.assert_close(cosine_BK.double(), expected.values, rtol=0, atol=error)
        assert class_BK.tolist() == expected.indices.tolist()


def test_ignored_rows_and_classes_that_are_not_there_have_no_nearest():
    with head_of(None, 200, sample_rate=0.01) as head:
        label_BT = torch.tensor([[3, -100, 5], [-100, 7, 7]])
        feat_BTD = features(0, 6).view(2, 3, D)
        loss, cosine_BTK, class_BTK = head.loss_and_topk(feat_BTD, label_BT, k=100)
        assert torch.equal(loss, head(feat_BTD, label_BT))
        ignored_BT, num_active = label_BT == -100, len(head.active_rows(torch.tensor([3, 5, 7])).rows)
        assert (class_BTK >= 0).sum(2).tolist() == ((~ignored_BT) * num_active).tolist()
        assert torch.equal(cosine_BTK == -torch.inf, class_BTK == -1)
        with pytest.raises(ValueError, match="k is 0"):
            head.loss_and_topk(feat_BTD, label_BT, k=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_centres_and_logits_of_chosen_classes(world_size):
    def on_rank(world):
        class_N = torch.tensor([10, 0, 5, 10][world.rank :])
        with head_of(world, 11, sub_centres=2) as head:
            feat_BD = features(world.rank, 3)
            return head.centres_of(class_N), head.logits(feat_BD, class_N), head.rank_of(class_N), class_N

    with head_of(None, 11, sub_centres=2) as whole:
        for rank, (centre, logit_BN, rank_N, class_N) in enumerate(in_world(world_size, on_rank)):
            assert torch.equal(centre, whole.centres[class_N])
            cosine_BC = dense_cosines(11, features(rank, 3), sub_centres=2)
            torch.testing.assert_close(logit_BN, 8.0 * cosine_BC[:, class_N], rtol=0, atol=1e-12)
            for number, owner in zip(class_N.tolist(), rank_N.tolist(), strict=True):
                shard = Shard.of(11, owner, world_size)
                assert shard.start <= number < shard.stop


@pytest.mark.parametrize("k", [0, 12, 101])
def test_k_out_of_range_is_named(k):
    with head_of(None, 11) as head, pytest.raises(ValueError, match=rf"k is {k}; expected 1 to 11"):
        head.topk(features(0, 2), k)


def test_a_class_out_of_range_is_named_on_all_ranks():
    def on_rank(world):
        with head_of(world, 11) as head, pytest.raises(ValueError, match="11"):
            head.centres_of(torch.tensor([11 if world.rank else 3]))

    in_world(2, on_rank)
