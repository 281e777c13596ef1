"""A head with two tables of class centres, killed and resumed: both tables come back, on any number of ranks."""

import json
import shutil
from pathlib import Path

import pytest

from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.recipes.conftest import class_folders
from tests.running import Given, killed, losses, same_tensors, several

STEPS, GLOBAL_BATCH = 9, 12


def given(data: Path, root: Path, num_ranks: int, faults: str = "") -> Given:
    flags = f"--folder {data} --models-root {root} --batch-size {GLOBAL_BATCH // num_ranks} --max-steps {STEPS} "
    flags += "--lr 0.1 --checkpoint-every 2 --verbose 0 --frequent 1 --precision fp64 --clip 1 --desync-every 3"
    return Given("tests.recipes.two_heads", flags.split(), faults)


@pytest.mark.long
def test_it_is_killed_and_resumes_on_as_many_ranks_and_on_another_number(tmp_path):
    data, whole, root = class_folders(tmp_path / "data"), tmp_path / "whole", tmp_path / "killed"
    several([given(data, whole, 2)])
    assert losses(whole)[-1] < losses(whole)[0]
    # That of step 4 counts before the next one begins.
    killed(given(data, root, 2, "stall@7"), 2, root / "checkpoints/step-00000004/COMPLETE", tmp_path / "output")
    three = shutil.copytree(root, tmp_path / "three")

    assert f"resumed from {root}/checkpoints/step-00000004" in several([given(data, root, 2)])
    assert losses(root) == losses(whole)
    last = f"checkpoints/step-{STEPS:08d}"
    names = sorted(path.name for path in (whole / last).glob("head-*"))
    assert [name.partition("-classes")[0] for name in names] == [
        f"head-{table}-{rank:05d}-of-00002" for table in ("fine", "pairs") for rank in (0, 1)
    ]
    same_tensors(whole / last, root / last)
    manifest = json.loads((root / last / "manifest.json").read_text())
    assert manifest["head"] == {"num_steps": STEPS}
    assert {name: table["num_classes"] for name, table in manifest["tables"].items()} == {"fine": 3, "pairs": 2}
    assert verify(VerifyOptions((root / last,))) == 0

    assert f"resumed from {three}/checkpoints/step-00000004" in several([given(data, three, 3)], 3)
    assert losses(three) == pytest.approx(losses(whole), rel=1e-9)
