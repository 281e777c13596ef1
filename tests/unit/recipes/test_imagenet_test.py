"""The test of recipe imagenet with --head partial-fc: the nearest centre of any of a class's is the prediction."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from partial_fc.comm import SingleWorld
from partial_fc.evaluate import Classification
from partial_fc.head import CosFace, PartialFC
from recipes.imagenet_epochs import PartialFCTest


@pytest.mark.parametrize("sub_centres", [1, 3])
def test_a_class_is_as_near_as_its_nearest_centre(sub_centres, monkeypatch):
    head = PartialFC(7, 5, CosFace(), sub_centres=sub_centres)
    feat_BD = torch.randn(11, 5)
    seen = []
    monkeypatch.setattr(Classification, "run", lambda self, forward, world: seen.append(forward(feat_BD)) or iter(()))
    source = SimpleNamespace(num_classes=7, __len__=lambda: 1)
    test = PartialFCTest.__new__(PartialFCTest)
    test._head, test.source = head, source
    list(test.run(lambda batch: batch, SingleWorld()))
    centre_CKD = head.centres.reshape(7, sub_centres, 5)
    expected = [[max(normalize(f, dim=0) @ normalize(c, dim=0) for c in k) for k in centre_CKD] for f in feat_BD]
    torch.testing.assert_close(seen[0], torch.tensor(expected))
