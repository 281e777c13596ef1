"""What the benchmarks compare with computes the same: otherwise a speedup would mean nothing."""

import torch

from benchmarks import head_worker
from benchmarks.insightface_style import InsightFaceStyleHead
from partial_fc.head import CosFace, PartialFC
from partial_fc.head.rows import RowSGD
from tests.flat import flat_head, learn


def test_textbook_and_ours_agree_for_three_steps(world):
    ours = PartialFC(101, 16, CosFace(16.0), 1.0, world, optimizer=RowSGD(0.9, 5e-4))
    textbook = InsightFaceStyleHead(101, 16, CosFace(16.0), 1.0, world)
    textbook.weight_LD.data.copy_(ours.centres)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        feat = torch.randn(6, 16, generator=generator)
        label = torch.randint(0, 101, (6,), generator=generator)
        results = []
        for head in (ours, textbook):
            leaf = feat.clone().requires_grad_()
            results.append((learn(head, leaf, label), leaf.grad))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.centres, textbook.weight_LD.detach(), rtol=1e-3, atol=1e-5)


def test_label_by_label_computes_what_one_pass_does(world):
    generator = torch.Generator().manual_seed(world.rank)
    feat, label = torch.randn(6, 16, generator=generator), torch.randint(0, 101, (6, 4), generator=generator)
    results = []
    for loss_of in (lambda *given: given[0](*given[1:]), head_worker._label_by_label):
        head, leaf = flat_head(101, 16, CosFace(16.0), 0.3, world, impl="cpu"), feat.clone().requires_grad_()
        loss = loss_of(head, leaf, label)
        loss.backward()
        head.step(0.1)
        results.append((loss.detach(), leaf.grad, head.centres))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
