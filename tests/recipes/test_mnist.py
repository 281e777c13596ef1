"""Recipe `mnist` as its users start it, on some of scikit-learn's digits."""

import json
import re
import shlex
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler

from partial_fc.checkpoint import apex
from partial_fc.data.digits import load
from partial_fc.data.idx import names, read_set, write_idx
from partial_fc.models.convnet import ConvNet
from recipes import mnist
from recipes.mnist_config import parse
from tests.recipes.conftest import LAUNCHERS, losses, result, run

NUM_TRAIN, NUM_TEST = 151, 101  # no number of processes divides them
# An epoch has 7 updates: 6 of 24 images, and one of the 7 that are left.
GLOBAL_BATCH = 24


def write_set(folder: Path, **arrays) -> Path:
    folder.mkdir()
    for split in ("train", "t10k"):
        for name, array in zip(names(split), arrays[split], strict=True):
            write_idx(folder / name, array)
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """Some of the digits, as files in MNIST/raw."""
    folder = tmp_path_factory.mktemp("mnist") / "MNIST"
    folder.mkdir()
    sets = {
        split: (found.image_NHW[:number], found.label_N[:number].astype(np.uint8))
        for (split, found), number in zip(load().items(), (NUM_TRAIN, NUM_TEST), strict=True)
    }
    write_set(folder / "raw", **sets)
    return folder.parent


def train_here(data: Path, models_root: Path, flags: str = "") -> None:
    """In this process, which saves the seconds that torch takes to be imported."""
    words = f"--data-dir {data} --models-root {models_root} --batch-size {GLOBAL_BATCH} --lr 0.05 --precision fp32"
    assert mnist.main(shlex.split(f"{words} {flags}")) == 0


def train_several(data: Path, runs: list[tuple[Path, str]], num_ranks: int, **environ: str) -> None:
    """One after the other, in one launch."""
    words = [f"--data-dir {data} --models-root {root} --lr 0.05 {flags}" for root, flags in runs]
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={num_ranks}", "--no-python"]
    more = ["env", *(f"{name}={value}" for name, value in environ.items())]
    run([*more, *launcher, sys.executable, "-m", "tests.recipes.mnist_several", *words])


def reference(
    data: Path, num_ranks: int, epochs: int, lr: float, dtype: torch.dtype
) -> tuple[list[float], dict]:
    """The tutorial's loop, written anew for one process: a replica for each rank, whose gradients are averaged. Returns
    the losses, averaged over the ranks, and the weights."""
    image_NHW, label_N = (torch.tensor(t) for t in read_set(data, "train"))
    image_N1HW = (image_NHW / 255).unsqueeze(1).to(dtype)
    replicas = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        replicas.append(ConvNet().to(dtype))
    samplers = [DistributedSampler(range(len(label_N)), num_ranks, r) for r in range(num_ranks)]  # type: ignore[arg-type]
    curve, batch_size = [], GLOBAL_BATCH // num_ranks
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [torch.tensor(list(sampler)).split(batch_size) for sampler in samplers]
        for batch_of_rank in zip(*orders, strict=True):
            each = [
                F.cross_entropy(net(image_N1HW[batch]), label_N[batch])
                for net, batch in zip(replicas, batch_of_rank, strict=True)
            ]
            loss = torch.stack(each).mean()
            gradients = [
                torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for net in replicas
            ]
            with torch.no_grad():
                for parts in zip(*(net.parameters() for net in replicas), *gradients, strict=True):
                    step = sum(parts[num_ranks:])
                    for p in parts[:num_ranks]:
                        p -= lr * step
            curve.append(loss.item())
    return curve, dict(replicas[0].named_parameters())


def assert_same_weights(root: Path, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    found = load_file(root / "model.safetensors")
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t.detach(), rtol=tolerance, atol=tolerance)


def assert_same_files(one: Path, other: Path, step: int) -> None:
    """Two checkpoints, tensor by tensor and bit by bit."""
    folders = [root / "checkpoints" / f"step-{step:08d}" for root in (one, other)]
    files = sorted(path.name for path in folders[0].glob("*.safetensors"))
    assert len(files) >= 3
    for name in files:
        a, b = (load_file(folder / name) for folder in folders)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    for key in (
        "epoch",
        "update",
        "step",
    ):  # not the best accuracy: an interrupted run is looked at more often
        assert manifests[0]["position"][key] == manifests[1]["position"][key]
    assert manifests[0]["scaler"] == manifests[1]["scaler"]


# ---- one process


def test_equals_the_tutorials_loop(digits, tmp_path):
    train_here(digits, tmp_path, "--precision fp64")
    curve, weights = reference(digits, 1, epochs=2, lr=0.05, dtype=torch.float64)
    assert losses(tmp_path) == pytest.approx(curve, rel=1e-8)
    assert_same_weights(tmp_path, weights, 1e-9)
    assert np.mean(curve[-5:]) < np.mean(curve[:5])


def test_what_is_printed_and_written(digits, tmp_path, capfd):
    train_here(digits, tmp_path, "--batch-size 1 --epochs 2 --lr 0.003")
    printed = capfd.readouterr().out.splitlines()
    steps = [line for line in printed if "Step" in line]
    curve = losses(tmp_path)
    assert steps == [
        f"Epoch [1/2], Step [100/151], Loss: {curve[99]:.4f}",
        f"Epoch [2/2], Step [100/151], Loss: {curve[250]:.4f}",
    ]
    found = result(tmp_path)
    accuracy = [line for line in printed if "accuracy" in line]
    assert len(accuracy) == 2
    correct = round(found["test_accuracy"] * NUM_TEST)
    assert accuracy[
        -1
    ] == f"Epoch [2/2], Test accuracy: {correct / NUM_TEST:.2%} ({correct} of {NUM_TEST})".replace("%", " %")
    assert re.fullmatch(r"Training complete in: \d+:\d\d:\d\d\.\d{6}", printed[-1])
    assert found["steps"] == 302
    assert found["images_per_s"] > 0
    assert found["test_accuracy"] > 0.3
    assert list((tmp_path / "tensorboard").iterdir())
    assert (tmp_path / "logs" / "rank-0000.log").read_text().count(" rank 0 I Epoch [") == 4


def test_accuracy_and_mistakes_are_those_of_the_model_it_leaves(digits, tmp_path):
    train_here(digits, tmp_path, "--epochs 1")
    net = ConvNet().eval()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    image_NHW, label_N = (torch.tensor(t) for t in read_set(digits, "t10k"))
    prediction_N = net((image_NHW / 255).unsqueeze(1)).argmax(1)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    for label, prediction in zip(label_N, prediction_N, strict=True):
        confusion[label, prediction] += 1
    found = result(tmp_path)
    assert found["confusion"] == confusion.tolist()
    assert found["test_accuracy"] == pytest.approx((prediction_N == label_N).double().mean().item())
    num_drawn = min(60, int((prediction_N != label_N).sum()))
    assert num_drawn > 0
    picture = cv2.imread(str(tmp_path / "mistakes.png"))
    assert picture.shape == (-(-num_drawn // 10) * (28 * 3 + 18), 10 * (28 * 3 + 2), 3)


@pytest.mark.parametrize(
    "flags",
    [
        "--momentum 0.9",
        "--precision fp16-o2 --momentum 0.9 --gradient-compression powersgd",
        "--precision fp16 --accumulate 2 --gradient-compression 2bit",
    ],
)
def test_resume_continues_bit_by_bit(digits, tmp_path, flags, capfd):
    """Interrupted within an epoch, at its end (after 7, or 4 where two batches make an update), within the next."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_here(digits, whole, flags)
    for max_steps in (2, 4, 5) if "accumulate" in flags else (2, 7, 8):
        train_here(digits, parts, f"{flags} --max-steps {max_steps}")
        assert result(parts)["steps"] == max_steps
    capfd.readouterr()
    train_here(digits, parts, flags)
    assert "resumed from" in capfd.readouterr().out
    assert losses(parts) == losses(whole)
    assert_same_files(whole, parts, result(whole)["steps"])
    assert result(parts)["confusion"] == result(whole)["confusion"]

    finished = (parts / "result.json").read_text()
    train_here(digits, parts, flags)
    assert "is finished" in capfd.readouterr().out
    assert (parts / "result.json").read_text() == finished


def test_accumulated_batches_are_one_large_one(tmp_path):
    """All images are the same one, so that batch norm sees the same in every batch, however it is cut."""
    found = load()["train"]
    same = np.repeat(found.image_NHW[:1], 84, 0), np.full(84, 3, np.uint8)
    data = write_set(tmp_path / "data", train=same, t10k=same)
    for number, more in enumerate(
        ("", "--gradient-compression 2bit --compression-threshold 0.01", "--momentum 0.9")
    ):
        one, four = tmp_path / f"one{number}", tmp_path / f"four{number}"
        train_here(data, one, f"--precision fp64 --batch-size 32 --lr 0.001 {more}")
        train_here(data, four, f"--precision fp64 --batch-size 8 --accumulate 4 --lr 0.001 {more}")
        assert len(losses(one)) == 6  # 32, 32 and 20 images, twice
        assert losses(four) == pytest.approx(losses(one), rel=1e-7)
        weights = load_file(one / "model.safetensors")
        assert_same_weights(four, {name: weights[name] for name, _ in ConvNet().named_parameters()}, 1e-8)
        assert losses(one)[-1] < losses(one)[0]


def test_reading_processes_change_nothing(digits, tmp_path):
    train_here(digits, tmp_path / "none", "--epochs 1")
    train_here(digits, tmp_path / "two", "--epochs 1 --n_workers 2")
    assert losses(tmp_path / "two") == losses(tmp_path / "none")


def test_orders_of_epochs_differ_and_depend_on_the_seed(digits, tmp_path):
    for seed in (0, 1):
        train_here(digits, tmp_path / str(seed), f"--lr 0 --seed {seed}")
    first, second = losses(tmp_path / "0")[:7], losses(tmp_path / "0")[7:]
    assert first != second  # with --lr 0 only the order is another one
    assert first != losses(tmp_path / "1")[:7]


@pytest.mark.parametrize("precision", ["fp16-o2", "fp16", "bf16"])
def test_precisions_learn_as_fp32(digits, tmp_path, precision):
    for mode in ("fp32", precision):
        train_here(digits, tmp_path / mode, f"--epochs 8 --lr 0.01 --momentum 0.9 --precision {mode}")
    wide, narrow = (result(tmp_path / mode) for mode in ("fp32", precision))
    assert wide["test_accuracy"] > 0.8
    assert narrow["test_accuracy"] > wide["test_accuracy"] - 0.06  # 6 of 101 images
    curves = [losses(tmp_path / mode) for mode in ("fp32", precision)]
    assert np.mean(curves[1][-7:]) < np.mean(curves[0][-7:]) + 0.1
    assert curves[0] != curves[1]
    weights = load_file(tmp_path / precision / "model.safetensors")
    assert {t.dtype for name, t in weights.items() if "num_batches" not in name} == {torch.float32}


# ---- Apex's files


def test_apex_file_is_written_and_started_from(digits, tmp_path, capfd):
    flags = "--precision fp16-o2 --momentum 0.9"
    file = tmp_path / "amp_checkpoint.pt"
    train_here(digits, tmp_path / "first", f"{flags} --epochs 1 --save-amp {file}")
    found = apex.read(file)
    assert found.loss_scale == result(tmp_path / "first")["loss_scale"]
    manifest = json.loads((tmp_path / "first/checkpoints/step-00000007/manifest.json").read_text())
    assert found.unskipped == manifest["scaler"]["clean_steps"] > 0
    train_here(digits, tmp_path / "second", f"{flags} --epochs 1 --load-amp {file}")
    assert f"started from {file}" in capfd.readouterr().out

    # The same as by hand: torch's own SGD takes the file's momentum, on the images of epoch 0.
    net = ConvNet()
    net.load_state_dict(found.model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(found.optimizer)
    image_NHW, label_N = (torch.tensor(t) for t in read_set(digits, "train"))
    order = list(DistributedSampler(range(NUM_TRAIN), 1, 0))  # type: ignore[arg-type]
    by_hand = []
    for batch in torch.tensor(order).split(GLOBAL_BATCH)[:3]:
        loss = F.cross_entropy(net((image_NHW[batch] / 255).unsqueeze(1)), label_N[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        by_hand.append(loss.item())
    assert losses(tmp_path / "second")[:3] == pytest.approx(by_hand, abs=0.03)

    # Its own checkpoint comes before the file; another run's file is refused by name.
    train_here(digits, tmp_path / "second", f"{flags} --epochs 2 --load-amp {file}")
    assert "is for a new run; this one goes on from" in capfd.readouterr().out
    torch.save({"model": {}}, file)
    with pytest.raises(ValueError, match="expected Apex's three parts"):
        train_here(digits, tmp_path / "third", f"--load-amp {file}")


def test_loss_scale_of_apexs_file_falls_until_gradients_fit(digits, tmp_path, capfd):
    torch.manual_seed(0)
    net = ConvNet()
    file = tmp_path / "amp_checkpoint.pt"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    apex.write(file, net.state_dict(), optimizer, 2.0**24, 1999)
    train_here(digits, tmp_path / "fp16", f"--precision fp16 --load-amp {file}")
    found = result(tmp_path / "fp16")
    assert found["loss_scale"] == 2.0 ** (24 - found["skipped_updates"])
    assert found["skipped_updates"] >= 3
    assert capfd.readouterr().out.count("the gradient overflowed, no update") == found["skipped_updates"]
    # Updates that were not made left nothing behind: up to the first one made, losses are those at rate 0.
    train_here(digits, tmp_path / "still", f"--precision fp16 --load-amp {file} --lr 0")
    first = next(
        i
        for i, (a, b) in enumerate(zip(losses(tmp_path / "fp16"), losses(tmp_path / "still"), strict=False))
        if a != b
    )
    assert first > 3
    weights = load_file(tmp_path / "fp16" / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())

    train_here(digits, tmp_path / "fp32", f"--load-amp {file}")
    assert "has loss scale 1.67772e+07; this run, --precision fp32, has none" in capfd.readouterr().out


# ---- several processes

PLAIN = f"--precision fp32 --lr 0.05 --epochs 1 --batch-size {GLOBAL_BATCH // 2}"
OWING = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --gradient-compression 2bit --compression-threshold 0.01"
HALVES = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --precision fp16-o2"


@pytest.fixture(scope="module")
def two(digits, tmp_path_factory) -> Path:
    """What two processes leave behind, torchrun's."""
    root = tmp_path_factory.mktemp("two")
    runs = [
        (root / "torchrun", PLAIN),
        *exact_runs(root, 2),
        (root / "whole", OWING),
        (root / "parts", f"{OWING} --max-steps 4"),
        (root / "parts", OWING),
        (root / "halves", f"{HALVES} --max-steps 10"),
    ]
    train_several(digits, runs, num_ranks=2, OVERFLOW_AT="6")
    return root


def exact_runs(root: Path, num_ranks: int) -> list[tuple[Path, str]]:
    flags = f"--precision fp64 --batch-size {GLOBAL_BATCH // num_ranks}"
    return [(root / "plain", flags), (root / "shared", f"{flags} --sync-bn")]


def test_launchers_agree(digits, two, tmp_path):
    """Two processes with a batch norm each, fp32. (That the curve is the tutorial's is seen in fp64, below.)"""
    expected = losses(two / "torchrun")
    assert len(expected) == 7
    for name in ("horovodrun --gloo", "horovodrun --mpi", "--gpus 2"):
        root = tmp_path / name.replace(" ", "")
        words = f"--data-dir {digits} --models-root {root} {PLAIN} {'' if name in LAUNCHERS else name}"
        printed = run([*LAUNCHERS.get(name, []), sys.executable, "train.py", "mnist", *shlex.split(words)])
        assert len(re.findall(r"Training complete in: \d+:\d\d:\d\d\.\d{6}", printed)) == 1
        assert losses(root) == pytest.approx(expected, abs=1e-6), name
        assert result(root)["world_size"] == 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_processes_give_the_curve_of_one(digits, tmp_path, num_ranks, request):
    if num_ranks == 2:
        root = request.getfixturevalue("two")
    else:
        root = tmp_path
        train_several(digits, exact_runs(root, num_ranks), num_ranks)

    # As the tutorial has it, with a batch norm in each process.
    curve, weights = reference(digits, num_ranks, epochs=2, lr=0.05, dtype=torch.float64)
    assert losses(root / "plain") == pytest.approx(curve, rel=1e-8)
    assert_same_weights(root / "plain", weights, 1e-8)

    # With batch norm over all processes: one process, whole batch. (The last update of an epoch repeats images, as many
    # as the number of processes wants.)
    train_here(digits, tmp_path / "one", f"--sync-bn --precision fp64 --batch-size {GLOBAL_BATCH}")
    several, one = losses(root / "shared"), losses(tmp_path / "one")
    assert len(several) == len(one) == 14
    assert several[:6] == pytest.approx(one[:6], rel=1e-8)
    for name in ("plain", "shared"):
        assert np.sum(result(root / name)["confusion"]) == NUM_TEST


def test_two_processes_resume_and_agree_on_what_overflows(digits, two):
    whole, parts, halves = (two / name for name in ("whole", "parts", "halves"))

    # Interrupted and resumed, with what each rank has for itself: its batch norms, what its gradients still owe.
    assert losses(parts) == losses(whole)
    assert_same_files(whole, parts, 14)

    # In step 6 the numbers of rank 1 alone overflowed: nobody made that update (mnist_several compares the replicas).
    assert "step 6: the gradient overflowed, no update" in (halves / "logs/rank-0000.log").read_text()
    found = result(halves)
    assert found["loss_scale"] == 2.0 ** (16 - found["skipped_updates"])
    weights = load_file(halves / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())

    # One process takes over what two owed, from the end of an epoch; within one, only two can finish it.
    train_here(digits, parts, f"{OWING} --epochs 3")
    assert result(parts)["steps"] == 14 + 13
    with pytest.raises(
        ValueError, match=r"in the midst of epoch 2, and this run's number of processes would"
    ):
        train_here(digits, halves, HALVES)


# ---- what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--engine mxnet", "--engine mxnet is not there yet"),
        ("--epochs 0", "--epochs is 0; expected at least 1"),
        ("--batch_size 0", "--batch-size is 0"),
        ("--accumulate 0", "--accumulate is 0"),
        ("--lr -1", "--lr is -1.0; expected at least 0"),
        ("--lr nan", "--lr is nan"),
        ("--momentum 1", "--momentum is 1.0"),
        ("--n_workers -1", "--n-workers is -1"),
        ("--max-steps 0", "--max-steps is 0"),
        (
            "--compression-rank 2",
            "--compression-rank goes with --gradient-compression powersgd; this run's is none",
        ),
        ("--gradient-compression 2bit --compression-threshold 0", "--compression-threshold is 0.0"),
        ("--load-amp a.pt --resume b", "--load-amp a.pt and --resume b both say where to start"),
        ("--gpus 0", "--gpus is 0"),
        ("--save-amp a.pt --precision fp64", "Apex's files hold fp32 weights"),
    ],
)
def test_flags_that_make_no_sense(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(shlex.split(flags))
    assert ended.value.code == 2
    assert message in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )  # tyro draws a box around it


def test_the_tutorials_command_line():
    config = parse(shlex.split("-n 2 -g 2 -nr 1 --epochs 5 --batch_size 64 --master-addr ip1"))
    assert (config.launch.nodes, config.launch.gpus, config.launch.nr) == (2, 2, 1)
    assert (config.epochs, config.batch_size) == (5, 64)
    config = parse([])
    assert (config.epochs, config.lr, config.batch_size, config.n_workers) == (2, 1e-4, 100, 0)


def test_data_that_cannot_be_used(digits, tmp_path):
    with pytest.raises(ValueError, match=r"no MNIST files in .*`partial-fc data digits"):
        train_here(tmp_path / "nothing", tmp_path / "run")
    large = np.zeros((4, 32, 32), np.uint8), np.zeros(4, np.uint8)
    data = write_set(tmp_path / "large", train=large, t10k=large)
    with pytest.raises(
        ValueError, match=r"the train images have 32 x 32 pixels; the ConvNet takes 28 x 28 only"
    ):
        train_here(data, tmp_path / "run")


def test_a_rate_that_is_too_high_ends_the_run(digits, tmp_path):
    with pytest.raises(
        FloatingPointError, match=r"nothing was updated in this step.*try less than --lr 1e\+30"
    ):
        train_here(digits, tmp_path, "--lr 1e30")


def test_checkpoints_of_other_runs(digits, tmp_path, capfd):
    train_here(digits, tmp_path, "--epochs 1")
    with pytest.raises(ValueError, match="is ahead of where this run would start"):
        train_here(digits, tmp_path, "--resume never")
    with pytest.raises(ValueError, match="is beyond this run's end"):
        train_here(digits, tmp_path, "--max-steps 5")
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        train_here(digits, tmp_path, f"--resume {tmp_path / 'elsewhere'}")
    capfd.readouterr()
    train_here(digits, tmp_path, "--lr 0.01 --gradient-compression 2bit")
    printed = capfd.readouterr().out
    assert "was trained with --lr 0.05, this run has 0.01: not the same run" in printed
    assert "--gradient-compression none, this run has 2bit" in printed
    (tmp_path / "checkpoints/step-00000014/rank-00000-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank-00000-of-00001.safetensors is missing"):
        train_here(digits, tmp_path, "--epochs 3")
