"""OneVision-Encoder's head with 8 labels a row, as published, beside MeanSoftmax: one process, all classes.

git show HEAD:training/fused_partial_fc_v2_multi_res.py > FILE     # in a clone of EvolvingLMMs-Lab/OneVision-Encoder
ONEVISION_PARTIAL_FC=FILE pytest tests/unit/head/test_onevision.py
"""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from partial_fc.head import CosFace
from tests.flat import flat_head

EXACT = "torch.autocast('cpu', enabled=False)"
FILE = os.environ.get("ONEVISION_PARTIAL_FC")
CLASSES, D, ROWS, K = 203, 24, 12, 8


@pytest.mark.skipif(FILE is None, reason="ONEVISION_PARTIAL_FC names no file")
def test_the_published_head_has_this_loss_and_these_gradients(tmp_path):
    """On a CPU, in float64 instead of bfloat16. Its loss is divided by 8, the gradients that its own backward forms
    are not."""
    assert FILE is not None
    text = Path(FILE).read_text().replace(".cuda()", "").replace("torch.cuda.amp.autocast(dtype=torch.bfloat16)", EXACT)
    text = text.replace('"cuda"', '"cpu", dtype=torch.float64').replace(".float()", ".double()")
    theirs: dict = {}
    exec(compile(text, FILE, "exec"), theirs)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(ROWS, D, generator=generator, dtype=torch.float64)
    label = torch.randint(0, CLASSES, (ROWS, K), generator=generator)
    label[0, 3:] = label[0, 2]
    head = flat_head(CLASSES, D, CosFace(32.0, 0.3), dtype=torch.float64)
    # Near to their labels' centres: it takes probabilities below 1e-30 for 1e-30.
    feat = torch.nn.functional.normalize(head.centres)[label].sum(dim=1) + noise / 3
    results = []

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        published = theirs["PartialFC_V2"](theirs["CombinedMarginLoss"](32, 1.0, 0.0, 0.3), D, CLASSES).double()
        published.weight.data.copy_(head.centres)
        leaf = feat.clone().requires_grad_()
        loss = published(leaf, label.clone(), K)
        loss.backward()
        results.append((loss.detach(), leaf.grad / K, published.weight.grad / K))
    finally:
        dist.destroy_process_group()

    leaf = feat.clone().requires_grad_()
    loss = head(leaf, label)
    loss.backward()
    grad_CD = torch.cat([grad_KD.clone() for *_, grad_KD in head.centre_gradients()])
    results.append((loss.detach(), leaf.grad, grad_CD))
    for name, published_one, ours in zip(("loss", "features", "centres"), *results, strict=True):
        error = ((published_one - ours).abs().max() / published_one.abs().max()).item()
        assert error < 1e-12, f"{name}: {error:.1e}"
