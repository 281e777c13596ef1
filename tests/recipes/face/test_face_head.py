"""Flags of the head in recipe `face`: resuming on two ranks is exact. (That each does something:
test_combinations.py.)"""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file

from tests.running import same_tensors, train_several


def data(glyphs) -> str:
    common = "--val-targets --check-data off --batch-size 8 --lr-scheduler constant --warmup-steps 0 --image-size 24 "
    return f"--dataset glyphs --rec {glyphs} {common}"


RESUMED = {
    # The others' states: tests/unit/head/rows/test_row_optimizers.py.
    "adamw": "--head-optimizer adamw --head-catch-up exact --centre-dtype bf16 --sample-rate 0.2",
    "hard negatives, curricularface": "--hard-negatives 3 --sample-rate 0.1 "
    "--loss curricularface --margins None --head-clip 0.5",
    "fp16-o2, sent as fp16": "--precision fp16-o2 --gradient-compression fp16 --accumulate 2 --sample-rate 0.3",
    "fp16, sent as bf16, adaface": "--precision fp16 --gradient-compression bf16 "
    "--loss adaface --margins None --sub-centres 2 --sample-rate 0.3",
}


@pytest.fixture(scope="module")
def resumed(glyphs, tmp_path_factory):
    """name -> (folder of the whole run, folder of one that goes on from the whole one's middle), on two ranks. (That a
    run goes on in its own folder: test_resume.py.)"""
    root = tmp_path_factory.mktemp("resumed")
    folders = {name: (root / name / "whole", root / name / "rest") for name in RESUMED}

    def runs(part: int, more: str = "") -> dict:
        return {
            folders[name][part]: data(glyphs)
            + flags
            + " --max-steps 4 --clip 5 --checkpoint-every 2"
            + more.replace("WHOLE", shlex.quote(str(folders[name][0])))
            for name, flags in RESUMED.items()
        }

    train_several(runs(0))
    printed = train_several(runs(1, " --resume WHOLE/checkpoints/step-00000002"))
    assert printed.count("resumed from") == len(RESUMED)
    return folders


@pytest.mark.long
@pytest.mark.parametrize("name", RESUMED)
def test_resume_continues_bit_by_bit(resumed, name):
    whole, rest = resumed[name]
    rows = [(root / "loss.csv").read_text().splitlines()[1:] for root in (whole, rest)]
    assert len(rows[0]) == 4
    assert rows[1] == rows[0][2:]
    folders = [root / "checkpoints/step-00000004" for root in (whole, rest)]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    assert manifests[0]["tables"] == manifests[1]["tables"]
    assert bool(manifests[0]["tables"][""]["head"]["margin"]) == ("adaface" in name or "curricularface" in name)
    model = load_file(whole / "model.safetensors")
    assert all(t.dtype in (torch.float32, torch.int64) for t in model.values())
    assert manifests[0].get("loss_scaler") == manifests[1].get("loss_scaler")
    assert ("loss_scaler" in manifests[0]) == ("fp16" in name)
    assert same_tensors(*folders) == 6 + 2 * ("hard negatives" in name)
    own = load_file(folders[0] / "rank-00001-of-00002.safetensors")
    assert all(key.startswith("buffer/") for key in own)
