"""The command line of GluonCV's train_recognizer.py, as recipe `kinetics` takes it."""

import shlex
from pathlib import Path

import pytest

from partial_fc import flags
from partial_fc.errors import UsageError
from recipes.kinetics import main as kinetics

R50 = "slowfast_4x16_resnet50_kinetics400"
LISTS = f"--model {R50} --train-list t.txt --val-list v.txt"
# The tutorial's command, but for the names of its files.
TUTORIAL = (
    "--dataset kinetics400 --data-dir /k/train --val-data-dir /k/val --train-list /k/train.txt --val-list /k/val.txt "
    f"--dtype float32 --mode hybrid --prefetch-ratio 1.0 --kvstore dist_sync_device --model {R50} --slowfast "
    "--slow-temporal-stride 16 --fast-temporal-stride 2 --video-loader --use-decord --num-classes 400 --batch-size 8 "
    "--num-gpus 8 --num-data-workers 32 --input-size 224 --new-height 256 --new-width 340 --new-length 64 "
    "--new-step 1 --lr-mode cosine --lr 0.4 --momentum 0.9 --wd 0.0001 --num-epochs 196 --warmup-epochs 34 "
    "--warmup-lr 0.01 --scale-ratios 1.0,0.8 --save-frequency 10 --log-interval 50 --logging-file slowfast_4x16.log "
    "--save-dir ./checkpoints"
)


def parsed(words: str) -> tuple[dict, list[str]]:
    config, notes = kinetics.parse(shlex.split(words))
    return flags.flat(config), notes


def test_the_command_of_the_tutorial():
    values, notes = parsed(TUTORIAL)
    expected = {
        "batch_size": 8, "gpus": 8, "num_workers": 4, "lr": 0.4, "lr_scaling": "none", "lr_scheduler": "cosine",
        "weight_decay": 1e-4, "epochs": 196.0, "warmup_epochs": 34.0, "warmup_lr": 0.01, "scale_ratios": (1.0, 0.8),
        "frequent": 50, "models_root": Path("checkpoints"), "precision": "fp32", "optimizer": "sgd", "accumulate": 1,
        "prefetch_ratio": 1.0,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    assert {note.split()[0] for note in notes} == {
        "--mode", "--slowfast", "--use-decord", "--kvstore", "--num-data-workers",
    }  # fmt: skip
    assert "32, of this machine: 4 threads for each of its 8 processes" in notes[-1]


def test_the_name_for_other_class_counts_is_the_same_network():
    values, _ = parsed(f"{LISTS.replace('kinetics400', 'custom')} --dataset custom --num-classes 7")
    assert (values["model"], values["num_classes"]) == ("slowfast_4x16_resnet50_custom", 7)


def test_under_a_launcher(monkeypatch):
    """The launcher has started the processes of --num-gpus already."""
    started = {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a",
               "MASTER_PORT": "1"}  # fmt: skip
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    values, _ = parsed(TUTORIAL)
    assert (values["gpus"], values["num_workers"]) == (1, 4)
    with pytest.raises(UsageError, match="has started 8 processes"):
        parsed(TUTORIAL.replace("--num-gpus 8", "--num-gpus 4"))
    # `partial-fc launch -n 4 -H host.txt`, as in the tutorial: a worker is a machine, and starts its processes itself.
    monkeypatch.setenv("PARTIAL_FC_LAUNCHER", "partial-fc launch")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    values, _ = parsed(TUTORIAL)
    assert (values["gpus"], values["num_workers"]) == (8, 4)


@pytest.mark.parametrize(
    ("theirs", "name", "value"),
    [
        ("num-gpus 0", "device", "cpu"),
        ("lr-mode poly", "lr_power", 2.0),
        ("lr-decay 0.5", "lr_factor", 0.5),
        ("dtype float16", "precision", "fp16-o2"),
        ("use-amp", "precision", "fp16"),
        ("more-fix-crop", "all_places", False),
        ("no-wd", "no_wd", True),
        ("freeze-bn", "freeze_bn", True),
        ("data-aug v3 --new-width 340", "data_aug", "v3"),
        ("accumulate 4", "accumulate", 4),
    ],
)
def test_what_their_flags_become(theirs, name, value):
    assert parsed(f"{LISTS} --{theirs}")[0][name] == value
