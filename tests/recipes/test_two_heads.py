"""A head with two tables of class centres, killed and resumed: both tables come back, on any number of ranks."""

import json
import shutil
import time
from pathlib import Path

import pytest

from partial_fc.train import loop
from partial_fc.verbs import train as train_command
from partial_fc.verbs.checkpoint.verify import VerifyOptions, verify
from tests.recipes.conftest import losses, same_tensors
from tests.recipes.launch import ranks, start
from tests.recipes.several import become_rank
from tests.recipes.test_new_recipe import class_folders
from tests.waiting import free_port

RECIPE, STEPS, STALLED, GLOBAL_BATCH = "tests/recipes/two_heads.py", 9, 7, 12


def train(words: list[str], stalls: bool = False) -> None:
    """In a forked process. stalls: before a step, for ever; the checkpoint of step 4 counts by then."""
    update = loop.update

    def stalled(job, *arguments):
        if stalls and job.at.step + 1 == STALLED:
            time.sleep(1000)
        return update(job, *arguments)

    loop.update = stalled
    train_command.exit_now(train_command.main([RECIPE, *words]))


def words(data: Path, root: Path, num_ranks: int, more: str) -> list[str]:
    flags = f"--models-root {root} --max-steps {STEPS} --checkpoint-every 2 --verbose 0 --frequent 1 --lr 0.1 {more}"
    return ["--folder", str(data), *flags.split(), "--batch-size", str(GLOBAL_BATCH // num_ranks)]


@pytest.mark.long
def test_it_is_killed_and_resumes_on_as_many_ranks_and_on_another_number(tmp_path):
    data, whole, killed = class_folders(tmp_path / "data"), tmp_path / "whole", tmp_path / "killed"
    flags = "--precision fp64 --clip 1 --desync-every 3"
    printed = ranks(2, train, words(data, whole, 2, flags))
    assert losses(whole)[-1] < losses(whole)[0]

    output, port = tmp_path / "output", free_port()
    given = words(data, killed, 2, flags)
    processes = [start(become_rank, rank, 2, port, str(output), train, given, True) for rank in range(2)]
    while not (killed / "checkpoints/step-00000004/COMPLETE").exists():
        assert all(process.is_alive() for process in processes), output.read_text()
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.join()
    three = shutil.copytree(killed, tmp_path / "three")

    printed = ranks(2, train, given)
    assert f"resumed from {killed}/checkpoints/step-00000004" in printed
    assert losses(killed) == losses(whole)
    last = f"checkpoints/step-{STEPS:08d}"
    names = sorted(path.name for path in (whole / last).glob("head-*"))
    assert [name.partition("-classes")[0] for name in names] == [
        f"head-{table}-{rank:05d}-of-00002" for table in ("fine", "pairs") for rank in (0, 1)
    ]
    same_tensors(whole / last, killed / last)
    manifest = json.loads((killed / last / "manifest.json").read_text())
    assert manifest["head"] == {"num_steps": STEPS}
    assert {name: table["num_classes"] for name, table in manifest["tables"].items()} == {"fine": 3, "pairs": 2}
    assert verify(VerifyOptions((killed / last,))) == 0
    scalars = (killed / "history.jsonl").read_text()
    assert "head-fine/never_touched" in scalars
    assert "head-pairs/never_touched" in scalars

    printed = ranks(3, train, words(data, three, 3, flags))
    assert f"resumed from {three}/checkpoints/step-00000004" in printed
    assert losses(three) == pytest.approx(losses(whole), rel=1e-9)
