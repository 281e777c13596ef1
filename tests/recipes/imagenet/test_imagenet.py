"""Recipe `imagenet` as Caffe2's users start it, on a few small images."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partial_fc.data.sample import Sample
from partial_fc.data.transform import ShortSideCrop
from recipes.imagenet import main as imagenet
from recipes.imagenet import resnet
from tests.recipes.imagenet.databases import datum, encoded_tensors, raw_tensors, write_leveldb, write_lmdb
from tests.recipes.imagenet.imagenet_job import BATCH, TWO_STAGES, UPDATES, C, N, picture, train_here, train_several
from tests.running import losses, reported, result, same_tensors

HEADER = (
    "time_spent,cumulative_time_spent,input_count,cumulative_input_count,cumulative_batch_count,inputs_per_sec,"
    "accuracy,epoch,learning_rate,loss,test_accuracy"
)

EXACT = "--precision fp64 --sync-bn --base_learning_rate 0.001"


def stored(kind) -> dict[bytes, bytes]:
    return {b"%08d_%d.png" % (i, i): kind(picture(i), i % C) for i in range(N)}


@pytest.fixture(scope="module", autouse=True)
def two_stages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet.NETWORKS, "resnet18", TWO_STAGES)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The same images as Datum and as TensorProtos."""
    folder = tmp_path_factory.mktemp("databases")
    write_lmdb(folder / "datum", stored(datum))
    write_lmdb(folder / "tensors", stored(raw_tensors))
    return folder


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Path:
    """A whole run of one process."""
    root = tmp_path_factory.mktemp("one")
    train_here(root, data / "datum", f"--test_data {data / 'tensors'}")
    return root


def rows(root: Path) -> list[dict[str, str]]:
    (path,) = root.glob("*.log")
    _, header, *lines = path.read_text().splitlines()
    assert header == HEADER
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "model.safetensors")


# ---- one process


def test_a_leveldb_of_tensors_gives_the_losses_of_an_lmdb_of_datums(one, tmp_path):
    level = write_leveldb(tmp_path / "level", stored(encoded_tensors).items())
    train_here(tmp_path / "leveldb", level, "--db_type leveldb")
    assert (tmp_path / "leveldb/loss.csv").read_bytes() == (one / "loss.csv").read_bytes()


def test_the_log_of_caffe2(one, data):
    (path,) = one.glob("*.log")
    assert re.fullmatch(rf"resnet18_gpu1_b{BATCH}_L{C}_lr0\.01_v2_\d{{8}}_\d{{6}}\.log", path.name)
    assert path.read_text().startswith(
        f"# Namespace(train_data='{data}/datum', test_data='{data}/tensors', db_type='lmdb', "
    )
    assert ", num_epochs=2, " in path.read_text()
    found = rows(one)
    assert [row["epoch"] for row in found] == ["0", "1"]
    assert [row["cumulative_batch_count"] for row in found] == [str(UPDATES - 1), str(2 * UPDATES - 1)]
    assert [row["cumulative_input_count"] for row in found] == ["0", str(UPDATES * BATCH)]
    curve = losses(one)
    assert [float(row["loss"]) for row in found] == pytest.approx([curve[UPDATES - 1], curve[-1]], rel=1e-6)
    assert {row["learning_rate"] for row in found} == {"0.01"}
    assert all(float(row["accuracy"]) * BATCH % 1 == 0 for row in found)
    assert f"Using epoch size: {UPDATES * BATCH}" in (one / "logs/rank-0000.log").read_text()
    assert reported(one)


def test_accuracy_is_that_of_the_model_it_leaves(one):
    """At the middle, every image once, BGR, with the running statistics."""
    net = resnet.build("resnet18", C, details=resnet.CAFFE2)
    net.load_state_dict(weights(one))
    net.eval()
    crop = ShortSideCrop(36, 32, random=False)
    rgb = np.stack([crop(Sample(picture(i), i % C, i), np.random.default_rng(0)) for i in range(N)])
    bgr = torch.tensor(rgb[..., ::-1].copy()).movedim(-1, 1)
    correct = (net((bgr.float() - 128) / 128).argmax(1) == torch.arange(N) % C).double().mean().item()
    assert result(one)["evaluations"]["test/accuracy"] == pytest.approx(correct)
    assert float(rows(one)[-1]["test_accuracy"]) == pytest.approx(correct)


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on(data, one, tmp_path):
    test = f"--test_data {data / 'tensors'}"
    for stop in ("--max-steps 2", "--max-steps 4", ""):  # within the first epoch, and the second
        train_here(tmp_path, data / "datum", f"{test} {stop}")
    assert losses(tmp_path) == losses(one)
    assert same_tensors(tmp_path, one) == 1
    found, whole = rows(tmp_path), rows(one)
    for name in ("epoch", "loss", "accuracy", "test_accuracy", "cumulative_batch_count", "cumulative_input_count"):
        assert [row[name] for row in found] == [row[name] for row in whole]


def test_without_data(tmp_path):
    train_here(tmp_path, "null", "--check-data off")
    log = (tmp_path / "logs/rank-0000.log").read_text()
    assert "--check-data off: synthetic data has nothing to check" in log
    assert [row["test_accuracy"] for row in rows(tmp_path)] == ["-1", "-1"]


# ---- files of other programs


def test_torchvisions_weights_are_started_from(data, tmp_path):
    torch.manual_seed(3)
    theirs = resnet.build("resnet18", C, details=resnet.TORCHVISION)
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    flags = f"--pretrained {tmp_path / 'resnet18.pth'} --conventions torchvision --base_learning_rate 0 --max-steps 1"
    train_here(tmp_path / "run", data / "datum", flags)
    found = weights(tmp_path / "run")
    assert all(torch.equal(found[name], p) for name, p in theirs.named_parameters())


def test_weights_of_a_run_and_of_one_of_its_checkpoints_are_started_from(one, data, tmp_path):
    """And of one with the same last layer; it begins at epoch 0."""
    flags = "--base_learning_rate 0 --max-steps 1 --load_model_path"
    (checkpoint,) = one.glob(f"checkpoints/*{2 * UPDATES}")
    for number, given in enumerate((one, checkpoint, one / "model.safetensors")):
        root = tmp_path / str(number)
        train_here(root, data / "datum", f"{flags} {given}")
        found = weights(root)
        assert all(torch.equal(t, found[name]) for name, t in weights(one).items() if "running" not in name
                   and "num_batches" not in name)  # fmt: skip
        assert (root / "loss.csv").read_text().splitlines()[1].startswith("1,")


def test_a_mdl_file_is_named_for_what_it_is(data, tmp_path):
    file = tmp_path / "net_2.mdl"
    file.write_bytes(b"\x0e\0\0\0\x09\0\0\0!!META_NET_DEF" + bytes(9))
    with pytest.raises(ValueError, match=r"net_2\.mdl is a checkpoint of Caffe2: .*torch\.save"):
        train_here(tmp_path / "run", data / "datum", f"--load_model_path {file}")


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--epoch_size 3", "--epoch_size 3 is less than one update, 4 images over all machines"),
        ("--num_labels 3", r"(?s)label-range \(5\): labels outside 0 to 2 .*key 00000003_3\.png"),
        ("--db_type leveldb", "is a LMDB, --db_type says leveldb"),
        ("--head-weight 2", "--head-weight.*--head partial-fc"),
        ("--max-steps 2 --warmup-epochs 1", "takes 3 updates .*ends after 2 .--max-steps 2.*--warmup-epochs 0"),
    ],
)
def test_what_cannot_be_trained(data, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(imagenet, "_backbone", None)  # nothing is built for it
    with pytest.raises(ValueError, match=message):
        train_here(tmp_path, data / "datum", flags)


def test_a_weight_of_its_one_head_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=r"--head-weight 2\.0: there is one head"):
        train_here(tmp_path, data / "datum", "--head partial-fc --head-weight 2")


# ---- two processes


@pytest.fixture(scope="module")
def two(data, tmp_path_factory) -> tuple[Path, str]:
    """What two processes leave behind, and what was printed."""
    root = tmp_path_factory.mktemp("two")
    test = f"--test_data {data / 'tensors'}"
    runs = [
        (root / "shared", data / "datum", f"{EXACT} {test}"),
        (root / "partial-fc", data / "datum", f"--head partial-fc {test}"),
        (root / "exploded", data / "datum", "--precision fp64 --base_learning_rate 1000 --epoch_size 4"),
    ]
    return root, train_several(runs)


def test_two_processes_equal_one(data, two, tmp_path):
    root, _ = two
    train_here(tmp_path, data / "datum", f"{EXACT} --test_data {data / 'tensors'}")
    assert losses(root / "shared") == pytest.approx(losses(tmp_path), rel=1e-9)
    assert result(root / "shared")["evaluations"] == result(tmp_path)["evaluations"]
    (path,) = (root / "shared").glob("*.log")
    assert f"_gpu2_b{BATCH}_" in path.name
    assert [row["cumulative_batch_count"] for row in rows(root / "shared")] == ["2", "5"]


def test_classes_may_be_shared_out(two):
    root, _ = two
    accuracy = result(root / "partial-fc")["evaluations"]["test/accuracy"]
    assert accuracy * N == pytest.approx(round(accuracy * N))
    assert float(rows(root / "partial-fc")[-1]["test_accuracy"]) == pytest.approx(accuracy)


def test_a_loss_of_forty_ends_all_ranks(two):
    root, printed = two
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} ended with: (?:FloatingPointError|Diverged): the epoch's last loss is \d+.*, 40 or more",
            printed,
        )
    assert not (root / "exploded/result.json").exists()
