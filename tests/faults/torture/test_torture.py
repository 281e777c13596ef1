"""`python -m tests.faults.torture` disturbs a training, which goes on from its checkpoints: can its losses tell?"""

import json
import shlex
import shutil
import sys

import pytest

from partial_fc import cli
from partial_fc.comm import SingleWorld
from partial_fc.train.record.boards import TensorBoard
from partial_fc.train.record.curve import read_scalars
from tests.faults.torture import victims
from tests.faults.torture.compare import compare
from tests.running import ROOT, SMALL, environment, train_here

JOB = [
    *SMALL,
    *shlex.split(
        "--dataset synthetic --num-classes 50 --num-images 64 --image-size 16 --batch-size 4 --precision fp64"
    ),
    *shlex.split("--max-steps 60 --checkpoint-every 5 --frequent 1"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    train_here(root, shlex.join(JOB[len(SMALL) :]))
    return root


@pytest.mark.long
@pytest.mark.parametrize("supervised", [False, True])
def test_a_run_whose_processes_are_killed_cannot_be_told_from_one_that_was_left_alone(
    undisturbed, tmp_path, monkeypatch, capsys, supervised
):
    """The command is started again, or, once, with --restarts, by which its supervisor starts the ranks again."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.environ", environment())
    # Of this seed the moments are some 20 and 30 steps apart.
    flags = ["--folder", str(tmp_path / "t"), "--mean-steps", "25", "--seed", "3"]
    flags += [] if supervised else ["--undisturbed", str(undisturbed)]
    job = [sys.executable, "train.py", "face", *JOB, *(["--gpus=2", "--restarts=9"] if supervised else [])]
    status = cli.run("torture", [*flags, "--", *job])
    output = (tmp_path / "t/output.txt").read_text()
    assert status == 0, capsys.readouterr().out + output[-3000:]
    told = json.loads((tmp_path / "t/torture.json").read_text())
    assert told["comparison"] == {
        "steps": 60, "differing": 0, "in_full": 60, "largest_difference": 0.0, "problems": [],
    }  # fmt: skip
    assert told["faults"]["rank"] >= 1
    assert told["starts"] == (1 if supervised else told["faults"]["rank"] + 1)
    assert 0 < told["effective"] < 1
    assert ("restart 1 of at most 9" in output) == supervised
    events = [json.loads(line)["what"] for line in (tmp_path / "t/events.jsonl").read_text().splitlines()]
    assert len([what for what in events if what.startswith("killed rank: ")]) == told["faults"]["rank"]


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("python train.py face --rec d", "", True),
        ("/usr/bin/python3 /x/bin/partial-fc train face --rec d", "", True),
        ("python -m partial_fc train face --rec d", "", True),
        ("python train.py face --rec d --gpus 2", "", False),
        ("python train.py face --rec d --gpus 2", "RANK=1", True),
        ("python -m partial_fc launch -n 2 python train.py face", "", False),
        ("python /x/bin/partial-fc launch -n 2 python train.py face", "", False),
        ("bash config.sh face", "HOROVOD_RANK=0", False),
        ("python", "", False),
    ],
)
def test_who_is_a_rank(words, environ, expected):
    assert victims._is_rank([*words.split(), ""], environ.encode()) == expected


def test_it_tells_a_repeated_sample_a_lost_step_and_another_loss(undisturbed, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(undisturbed, other)
    assert compare(undisturbed, other).equal(0.0)
    scalars = {name: dict(rows) for name, rows in read_scalars(undisturbed).items()}

    def written(name: str, factor: float) -> None:
        board = TensorBoard(other / "tensorboard", SingleWorld())  # a file beside, which counts more
        board.scalars(7, {name: scalars[name][7] * factor})
        board.close()

    written("train/loss", 1 + 3e-6)
    found = compare(undisturbed, other)
    assert found.largest_difference == pytest.approx(3e-6, rel=0.05)
    assert not found.equal(1e-6)
    written("train/epoch", 1 + 1e-3)
    (problem,) = compare(undisturbed, other).problems
    assert "samples were lost or repeated: at step 7 " in problem
    rows = (other / "loss.csv").read_text().splitlines()
    (other / "loss.csv").write_text("\n".join([*rows[:9], *rows[10:]]) + "\n")
    assert "59 rows for 60 steps: 1 missing" in compare(undisturbed, other).problems[0]
