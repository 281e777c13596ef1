"""Recipe `kinetics` as GluonCV's users start it, on a few short videos."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partial_fc.train.guards.signals import EXIT_PREEMPTED
from recipes.kinetics import gluoncv_files as gluoncv
from recipes.kinetics import slowfast
from recipes.kinetics.epochs import ClipLine
from tests.recipes.kinetics import videos
from tests.running import Given, here, losses, reported, result, several

R50, N, BATCH = "slowfast_4x16_resnet50_kinetics400", 10, 4
SMALL = (
    f"--dataset kinetics400 --model {R50} --width 8 --slowfast --video-loader --use-decord --num-classes 2 "
    "--new-height 32 --new-width 40 --input-size 32 --scale-ratios 1.0,0.8 --num-data-workers 1 --num-gpus 0 "
    "--lr-mode cosine --lr 0.01 --warmup-epochs 1 --warmup-lr 0.001 --num-epochs 2 --log-interval 1 --num-gpus 0"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Videos with their lists; five of them without the number of frames, which is not used."""
    folder = tmp_path_factory.mktemp("videos")
    lines = []
    for i in range(N):
        videos.write(folder / f"class_{i % 2}/{i}.mp4", 66 + i)
        lines.append(f"class_{i % 2}/{i} {66 + i if i % 2 else 0} {i % 2}\n")
    (folder / "train.txt").write_text("".join(lines))
    (folder / "val.txt").write_text("".join(lines[:5]))
    return folder


def words(root: Path, data: Path, more: str = "", batch: int = BATCH) -> list[str]:
    lists = f"--data-dir {data} --train-list {data}/train.txt --val-list {data}/val.txt --save-dir {root}"
    return shlex.split(f"{SMALL} --batch-size {batch} {lists} {more}")


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Path:
    """A whole run of one process."""
    root = tmp_path_factory.mktemp("one")
    assert here("recipes.kinetics.main", words(root, data, "--save-frequency 1 --logging-file slow.log")) == 0
    return root


def test_the_log_of_gluoncv(one):
    lines = (one / "slow.log").read_text().splitlines()
    assert lines[0].startswith("Namespace(train_list='")
    assert f"Load {N} training samples and 5 validation samples." in lines
    assert f"Total batch size is set to {BATCH} on 1 processes" in lines
    batch = r"Epoch\[%s\] Batch \[%s\]/\[0003\]\tSpeed: \d+\.\d{6} samples/sec\t accuracy=\d+\.\d{6}\t loss=\d\.\d{6}\t"
    for epoch, number in (("000", "0000"), ("000", "0002"), ("001", "0001")):
        assert any(re.match(batch % (epoch, number) + r" lr=0\.\d{6}\t", line) for line in lines), (epoch, number)
    for epoch in ("000", "001"):
        assert any(re.fullmatch(rf"\[Epoch {epoch}\] training: accuracy=[\d.]+\t loss=\d+\.\d+", s) for s in lines)
        assert any(re.fullmatch(rf"\[Epoch {epoch}\] speed: \d+ samples/sec\ttime cost: \d+\.\d+", s) for s in lines)
        validation = rf"\[Epoch {epoch}\] validation: acc-top1=\d+\.0{{6}} acc-top5=100\.0{{6}} loss=\d+\.\d+"
        assert any(re.fullmatch(validation, line) for line in lines)


def test_the_files_of_gluoncv(one):
    (best,) = one.glob(f"*-kinetics400-{R50}-000-best.params")
    accuracy = float(best.name.split("-")[0])
    assert accuracy in {i / 5 for i in range(1, 6)}
    last = one / f"kinetics400-{R50}-001.params"
    model = slowfast.build(R50, 2, width=8)
    gluoncv.load(model, last)
    stored = load_file(one / "model.safetensors")
    assert all(torch.equal(t, stored[name]) for name, t in model.state_dict().items() if "num_batches" not in name)
    assert result(one)["best"]["val"] >= accuracy
    assert reported(one)


# ---- stopped, killed, in another world: bit by bit what nobody disturbed


def test_a_run_that_is_stopped_goes_on(one, data, tmp_path, monkeypatch):
    """Within the first epoch."""
    due = ClipLine.due

    def stop(self, step, position):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return due(self, step, position)

    with monkeypatch.context() as patched:
        patched.setattr(ClipLine, "due", stop)
        assert here("recipes.kinetics.main", words(tmp_path, data)) == EXIT_PREEMPTED
    # The signal came in the midst of step 2; the ranks agree on it before step 3 ends.
    assert len(losses(tmp_path)) < 4
    assert here("recipes.kinetics.main", words(tmp_path, data)) == 0
    assert losses(tmp_path) == losses(one)
    assert result(tmp_path)["evaluations"] == result(one)["evaluations"]


def test_finished_weights_are_measured_in_several_views(one, data, tmp_path, capsys):
    with pytest.raises(ValueError, match="--eval: no weights; give --resume-params"):
        here("recipes.kinetics.main", words(tmp_path / "none", data, "--eval"))
    (best,) = one.glob("*-best.params")
    more = f"--eval --resume-params {best}"
    assert here("recipes.kinetics.main", words(tmp_path, data, more)) == 0
    (accuracy,) = re.findall(r"\[test\]\[0\] accuracy (\d\.\d+)", capsys.readouterr().out)
    assert float(accuracy) == pytest.approx(float(best.name.split("-")[0]), abs=1e-4)
    assert here("recipes.kinetics.main", words(tmp_path, data, f"{more} --num-segments 2 --three-crop")) == 0
    assert "2 x 3 clips a video" in capsys.readouterr().out


def test_two_processes_do_what_one_does(data, tmp_path):
    exact = "--precision fp64 --sync-bn --dropout 0 --check-data off --lr 0.001 --warmup-epochs 0 --num-epochs 1"
    assert here("recipes.kinetics.main", words(tmp_path / "one", data, exact)) == 0
    two = words(tmp_path / "two", data, exact, batch=BATCH // 2)
    several([Given("recipes.kinetics.main", two)])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    both, alone = (result(tmp_path / name)["evaluations"]["val/accuracy"] for name in ("two", "one"))
    assert both == alone


def test_batch_norms_that_stay_as_they_are(data, tmp_path):
    more = (
        "--partial-bn --freeze-bn --no-wd --clip-grad 0.1 --accumulate 2 --train-only --num-epochs 1 --warmup-epochs 0"
    )
    assert here("recipes.kinetics.main", words(tmp_path, data, more)) == 0
    state = load_file(tmp_path / "model.safetensors")
    assert (state["slow_res3.0.bn1.running_mean"] == 0).all()
    assert (state["fast_bn1.running_mean"] != 0).any()
    assert (state["slow_res3.0.bn1.weight"] == 1).all()
    assert (state["fc.bias"] != 0).all()
