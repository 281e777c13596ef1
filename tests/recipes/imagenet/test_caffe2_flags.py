"""The command lines of Caffe2's trainers, as recipe `imagenet` takes them."""

import shlex
from pathlib import Path

import pytest

from partial_fc import flags
from recipes.imagenet import caffe2_flags as caffe2
from recipes.imagenet import main as imagenet

# Theirs -> (flag here, value).
FLAGS = {
    "test_data /t": ("test_data", Path("/t")),
    "db_type leveldb": ("db_type", "leveldb"),
    "num_channels 3": ("num_channels", 3),
    "image_size 224": ("image_size", 224),
    "num_labels 10": ("num_labels", 10),
    "batch_size 64": ("batch_size", 64),
    "epoch_size 50000": ("epoch_size", 50000),
    "num_epochs 90": ("epochs", 90.0),
    "base_learning_rate 0.4": ("lr", 0.4),
    "weight_decay 0.0005": ("weight_decay", 0.0005),
    "num_shards 2": ("num_shards", 2),
    "num_shards 2 --shard_id 1": ("shard_id", 1),
    "run_id a": ("run_id", "a"),
    "redis_host ip1": ("redis_host", "ip1"),
    "redis_port 7000": ("redis_port", 7000),
    "file_store_path /nfs": ("file_store_path", Path("/nfs")),
    "load_model_path /a.pt": ("load_model_path", Path("/a.pt")),
    "use_cpu": ("device", "cpu"),
    "use_cpu True": ("device", "cpu"),
    "use_cpu False": ("device", "auto"),
    "dtype float": ("precision", "fp32"),
    "dtype float16": ("precision", "fp16-o2"),
    "distributed_interfaces eth0,eth1": ("network_interface", "eth0"),
    "distributed_interfaces=": ("network_interface", None),
    "model": ("network", "resnet50"),
    "model resnext": ("network", "resnet50"),
    "num_layers 101": ("network", "resnet101"),
    "resnext_num_groups 32": ("resnext_num_groups", 32),
    "resnext_width_per_group 4": ("resnext_width_per_group", 4),
    "image_mean_per_channel 1 2 3": ("image_mean_per_channel", (1.0, 2.0, 3.0)),
    "image_std_per_channel 1 2 3": ("image_std_per_channel", (1.0, 2.0, 3.0)),
    "test_epoch_size 50000": ("test_epoch_size", 50000),
    "first_iter_timeout 1200": ("start_timeout", 1200.0),
    "timeout 60": ("comm_timeout", 60.0),
    "gpus 0,": ("gpus", 1),
}


@pytest.fixture(autouse=True)
def nobody_started_this(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def parsed(words: str) -> tuple[dict, list[str]]:
    config, notes = imagenet.parse(["--train_data", "db", *shlex.split(words)])
    return flags.flat(config), notes


@pytest.mark.parametrize("given", FLAGS)
def test_every_flag_under_both_spellings(given):
    name, _, value = given.partition(" ")
    flag, expected = FLAGS[given]
    assert parsed(f"--{name} {value}")[0][flag] == expected
    other = caffe2.translate([f"--{name.replace('_', '-')}", *shlex.split(value)])
    assert str(other).replace("-", "_") == str(caffe2.translate([f"--{name}", *shlex.split(value)])).replace("-", "_")


def test_train_data_alone():
    found, notes = parsed("")
    assert notes == []
    expected = {"train_data": "db", "batch_size": 32, "gpus": 1, "image_size": 227, "resize": 256, "num_labels": 1000,
                "epoch_size": 1_500_000, "epochs": 1000.0, "lr": 0.1, "weight_decay": 1e-4, "momentum": 0.9,
                "network": "resnet50", "conventions": "caffe2", "order": "key", "precision": "fp32"}  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "gpus", "batch_size"),
    [
        ("--num_gpus 2 --batch_size 64", 2, 32),
        ("--num-gpus=2 --batch-size=64", 2, 32),
        ("--gpus 4 --batch_size 64", 4, 16),
        ("--num_gpus 2", 2, 16),  # the machine's 32
    ],
)
def test_the_batch_is_the_machines(given, gpus, batch_size):
    found, _ = parsed(given)
    assert (found["gpus"], found["batch_size"]) == (gpus, batch_size)


def test_chosen_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found, _ = parsed("--num_gpus 8 --gpus 0,2 --batch_size 64")
    assert (found["gpus"], found["batch_size"]) == (2, 32)
    assert caffe2.os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    found, notes = parsed("--gpus 0")
    assert (found["gpus"], caffe2.os.environ["CUDA_VISIBLE_DEVICES"], notes) == (1, "0", [])
    found, notes = parsed("--gpus 2")
    assert (found["gpus"], caffe2.os.environ["CUDA_VISIBLE_DEVICES"]) == (2, "0")
    assert "Caffe2's GPU number 2 alone is --gpus 2," in notes[0]


def test_under_a_launcher(monkeypatch):
    variables = {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "a",
                 "MASTER_PORT": 1}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert parsed("--batch_size 64")[0]["batch_size"] == 16
    # A worker of `partial-fc launch` that is alone on its host starts them itself.
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PARTIAL_FC_LAUNCHER": "partial-fc launch"}.items():
        monkeypatch.setenv(name, value)
    found, _ = parsed("--num_gpus 4 --batch_size 64")
    assert (found["gpus"], found["batch_size"]) == (4, 16)


def test_the_first_line_of_the_log():
    found, _ = parsed("--batch_size 64 --num_gpus 2 --base_learning_rate 0.2 --dtype float16 --test_data /t")
    line = str(caffe2.namespace(found, 2, "leveldb"))
    assert line.startswith(
        "Namespace(train_data='db', test_data='/t', db_type='leveldb', num_channels=3, image_size=227, "
    )
    for part in ("gpus=None", "num_gpus=2", "batch_size=64", "base_learning_rate=0.2", "num_epochs=1000",
                 "dtype='float16'", "run_id=None", "file_store_path='/tmp'"):  # fmt: skip
        assert f" {part}," in line.replace(")", ",")
    assert "password" not in line
