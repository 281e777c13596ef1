"""Centres read from a checkpoint are those of `head.centres`, also where rows lag behind (--head-catch-up exact)."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from partial_fc import checkpoint
from partial_fc.checkpoint import folders
from partial_fc.checkpoint.rows_now import load_centres, rows_now
from partial_fc.files import MANIFEST_BYTES, read_manifest
from partial_fc.head import CosFace, PartialFC, Storage
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD
from partial_fc.verbs.checkpoint import remap_classes
from partial_fc.verbs.model import classify
from tests.flat import flat_head, learn
from tests.unit.stored_checkpoints import D, save

C = 40
NAMES = [f"c{number:02d}" for number in range(C)]
SGD = RowSGD(momentum=0.9, weight_decay=0.05)


def trained(folder: Path, steps: int = 9, label_stop: int = C, **options) -> PartialFC:
    """A head whose rows lag behind, and its checkpoint, written by one process."""
    head = flat_head(C, D, CosFace(8.0), 0.1, catch_up="exact", **options)
    random = torch.Generator().manual_seed(0)
    for step in range(steps):
        feat_BD = torch.randn(3, D, generator=random).requires_grad_()
        learn(head, feat_BD, torch.randint(label_stop, (3,), generator=random), lr=0.5 / (1 + step))
    save(folder / "step-00000009", [head], step=9, names=NAMES)
    return head


def test_rows_lag_behind_in_the_files_and_not_when_they_are_read(tmp_path):
    head = trained(tmp_path, optimizer=SGD)
    stored = checkpoint.Checkpoint(tmp_path / "step-00000009")
    made = stored.rows().created(0, C).nonzero().squeeze(1)
    assert (stored.rows().read(made)["centres"] - head.centres[made]).abs().max() > 1e-3
    found = rows_now(stored).read(made)
    torch.testing.assert_close(found["centres"], head.centres[made], atol=1e-7, rtol=1e-6)
    assert (found["touched"] == 9).all()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (RowSGD(momentum=0.5, weight_decay=0.1, nesterov=True), {"sub_centres": 3}),
        (RowSGD(momentum=0.0), {"dtype": torch.float64}),
        (RowAdamW(weight_decay=0.2), {"sub_centres": 2}),
        (RowAdamW(), {"storage": Storage(torch.bfloat16, torch.float32)}),
        (RowAdagrad(weight_decay=0.1), {}),
        (RowAdagrad(), {}),
    ],
    ids=str,
)
def test_all_optimizers(tmp_path, optimizer, options):
    head = trained(tmp_path, optimizer=optimizer, **options)
    rows = rows_now(checkpoint.Checkpoint(tmp_path / "step-00000009"))
    for part in rows.parts():
        torch.testing.assert_close(part.tensors["centres"], head.centres[part.class_N], atol=1e-7, rtol=1e-6)
        one = rows.read(part.class_N[-2:], ["centres"])
        assert torch.equal(one["centres"], part.tensors["centres"][-2:])


def test_without_catch_up_rows_are_as_they_are_stored(tmp_path):
    head = PartialFC(C, D, CosFace(8.0), 0.1, optimizer=SGD)
    head.store.all_rows()
    save(tmp_path / "step-00000009", [head])
    (part,) = rows_now(checkpoint.Checkpoint(tmp_path / "step-00000009")).parts()
    assert torch.equal(part.tensors["centres"], head.store.centre_LD)


def test_classify_new_classes_and_start_from_centres_use_them(tmp_path, monkeypatch):
    head = trained(tmp_path, label_stop=8, optimizer=SGD)
    stored = checkpoint.Checkpoint(tmp_path / "step-00000009")
    made = stored.rows().created(0, C)
    assert 0 < made.sum() < C
    # classify, three classes at a time
    monkeypatch.setattr(classify, "_COSINES_AT_ONCE", 15)
    row_ND = torch.randn(5, D)
    cosine_NK, class_NK = classify.nearest(normalize(row_ND).numpy(), stored, 1)
    cosine_NC = (normalize(row_ND) @ normalize(head.centres).T).masked_fill(~made, -2)
    torch.testing.assert_close(cosine_NK[:, 0], cosine_NC.amax(1))
    assert torch.equal(class_NK[:, 0], cosine_NC.argmax(1))
    # the length of new classes
    trained_ones = (stored.rows().read(made.nonzero()[:, 0])["touched"] > 0).squeeze(1)
    length = head.centres[made][trained_ones].norm(dim=1).median().item()
    assert remap_classes.typical_length(stored.rows(), rows_now(stored)) == pytest.approx(length)
    # --head-centres
    fresh = PartialFC(C, D, CosFace(8.0))
    load_centres(stored, fresh)
    torch.testing.assert_close(fresh.centres[made], head.centres[made], atol=1e-7, rtol=1e-6)


def test_rows_of_more_steps_than_there_are_rates_are_refused(tmp_path):
    head = trained(tmp_path, optimizer=SGD)
    schedule = {**head.facts()["schedule"], "rates": [0.1] * 3}
    stored = checkpoint.Checkpoint(tmp_path / "step-00000009")
    stored.manifest["tables"][""]["head"]["schedule"] = json.loads(json.dumps(schedule))
    with pytest.raises(ValueError, match=r"rows stand for [0-2] to 9 steps; expected 0 to 3") as error:
        list(rows_now(stored).parts())
    assert "step-00000009" in str(error.value)


def test_a_run_of_any_length_can_go_on_from_its_checkpoint(tmp_path):
    """Its learning rates, 29 bytes a step in the manifest, passed what is read of a manifest at step 72,000."""
    head = flat_head(C, D, CosFace(8.0), 0.1, optimizer=SGD, catch_up="exact")
    schedule = {"optimizer": repr(SGD), "rates": [0.1 / (1 + step) for step in range(100_000)]}
    head.load_facts({**head.facts(), "num_steps": 100_000, "schedule": schedule})
    save(tmp_path / "step-00100000", [head], step=100_000, score=0.5)
    assert (tmp_path / "step-00100000/manifest.json").stat().st_size > MANIFEST_BYTES
    assert folders.newest(tmp_path) == folders.best(tmp_path) == tmp_path / "step-00100000"
    again = flat_head(C, D, CosFace(8.0), 0.1, optimizer=SGD, catch_up="exact")
    assert checkpoint.Checkpoint(tmp_path / "step-00100000").load_head(again) == []
    assert again.facts() == head.facts()


@pytest.mark.parametrize("more", ["[" * (3 << 20), '"rates": [' * 300_000, '"rates": ["' + "x" * (3 << 20)])
def test_only_learning_rates_make_a_manifest_long(tmp_path, more):
    (tmp_path / "manifest.json").write_text(more)
    with pytest.raises(OSError, match="bytes beside learning rates; at most 2,097,152") as error:
        read_manifest(tmp_path / "manifest.json")
    assert error.value.filename == str(tmp_path / "manifest.json")
