"""Recipe `mnist --engine mxnet`: MXNet's train_mnist.py over key-value stores."""

import re
import shlex
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data.idx import read_set
from recipes.mnist import main as mnist
from recipes.mxnet.kvstore_job import ELSEWHERE, asked_for, parse
from tests.recipes.mnist.mnist_job import NUM_TRAIN
from tests.recipes.mxnet import kvstore_job
from tests.running import run

# 5 updates an epoch: 2 workers x 16 images each, or 32 of one.
FIVE = "--num-examples 150 --num-epochs 1 --backbone lenet --lr 0.02"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_mxnet_has_and_this_has_not_is_said(name):
    flag, _, value = name.partition(" ")
    for spelling in (flag.replace("_", "-"), flag.replace("-", "_")):
        with pytest.raises(ValueError, match=f"--{spelling} ") as refused:
            parse([f"--{spelling}", *value.split()])
        assert ELSEWHERE[name] in str(refused.value)


def test_defaults_are_those_of_train_mnist():
    config = parse(shlex.split("--engine=mxnet --kv_store dist_device_sync --gpus 0,2"))
    assert (config.network, config.batch_size, config.num_epochs, config.lr, config.lr_step_epochs) == (
        "mlp", 64, 20, 0.05, "10",
    )  # fmt: skip
    assert (config.disp_batches, config.mom, config.wd, config.lr_factor) == (100, 0.9, 1e-4, 0.1)
    assert (config.kv_store, config.gpu_list, config.gc_threshold) == ("dist_device_sync", [0, 2], 0.5)
    assert mnist.parse([]).optim.batch_size == 100  # the tutorial's flags stay its own
    assert asked_for(["--lr", "1", "--engine", "mxnet"])
    assert not asked_for(["--engine", "torch", "--lr", "mxnet"])
    with pytest.raises(ValueError, match=r"--kv-store is of MXNet's train_mnist\.py: add --engine mxnet"):
        mnist.main(["--kv_store=dist_sync"])


def train(data: Path, prefix: Path, flags: str) -> dict[str, np.ndarray]:
    """In this process; returns the weights after the last epoch."""
    from recipes.mxnet.library import mx

    assert mnist.main(shlex.split(f"--engine mxnet --data-dir {data} --model-prefix {prefix} {flags}")) == 0
    return weights(mx, sorted(prefix.parent.glob(f"{prefix.name}-*.params"))[-1])


def weights(mx, path: Path) -> dict[str, np.ndarray]:
    return {name: array.asnumpy() for name, array in mx.nd.load(str(path)).items()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.mxnet
def test_equals_module_by_hand(mx, digits, tmp_path, capfd):
    """Two epochs of a Module whose updates are written out: sums over the batch over its size, decay of weights alone,
    momentum that carries the rate, a rate that falls after an epoch."""
    from recipes.mxnet import digits as of_mxnet
    from recipes.mxnet import module_fit

    found = train(digits, tmp_path / "m", "--network mlp --batch-size 32 --num-epochs 2 --lr-step-epochs 1 --loss ce")
    printed = capfd.readouterr().err
    images = read_set(digits, "train")
    symbol = of_mxnet.network("mlp", 10)
    module = mx.mod.Module(symbol)
    module.bind([("data", (32, 1, 28, 28))], [("softmax_label", (32,))])
    start = of_mxnet.DigitBatches(images, lambda _: of_mxnet.in_order(NUM_TRAIN, 32))
    drawn = module_fit.first_weights(symbol, start, module_fit.initializer("default"), 0)
    for weight in (drawn["fc1_weight"], drawn["fc2_weight"], drawn["fc3_weight"]):
        assert weight.asnumpy().std() == pytest.approx((2 / weight.shape[1]) ** 0.5, rel=0.1)
    held = {name: array.asnumpy() for name, array in drawn.items()}
    momentum = {name: np.zeros_like(array) for name, array in held.items()}
    seen = []
    for epoch, lr in enumerate((0.05, 0.005)):
        order_TB = of_mxnet.shuffled(NUM_TRAIN, 5, 32, 0, 1, 0, epoch)
        seen.append(order_TB.flatten()[:NUM_TRAIN])
        for index_B in order_TB:
            module.set_params({name: mx.nd.array(array) for name, array in held.items()}, {}, force_init=True)
            data = mx.nd.array(images.image_NHW[index_B][:, None] / 255)
            module.forward_backward(mx.io.DataBatch([data], [mx.nd.array(images.label_N[index_B])]))
            for name, (gradient,) in zip(module._param_names, module._exec_group.grad_arrays, strict=True):
                decay = 1e-4 if name.endswith("_weight") else 0
                step = gradient.asnumpy() / 32 + decay * held[name]
                momentum[name] = 0.9 * momentum[name] - lr * step
                held[name] = held[name] + momentum[name]
    assert_close(found, {f"arg:{name}": array for name, array in held.items()}, 2e-6)
    assert all(sorted(order) == list(range(NUM_TRAIN)) for order in seen)
    assert not np.array_equal(*seen)

    # Each test image counts once: 101 of them, in batches of 32.
    module.set_params({name: mx.nd.array(array) for name, array in held.items()}, {}, force_init=True)
    test = read_set(digits, "t10k")
    logits = module.predict(mx.io.NDArrayIter(test.image_NHW[:, None].astype("f") / 255, None, 32)).asnumpy()
    accuracy = float((logits.argmax(1) == test.label_N).mean())
    lines = re.findall(r"^\d{4}-\S+ \S+ Node\[0\] (.*)$", printed, re.MULTILINE)
    assert f"Epoch[1] Validation-accuracy={accuracy:f}" in lines
    assert f'Saved checkpoint to "{tmp_path}/m-0002.params"' in lines
    assert mx.model.load_checkpoint(str(tmp_path / "m"), 2)[0].tojson() == symbol.tojson()


@pytest.mark.mxnet
def test_names_and_sizes_are_those_of_mxnets_networks(mx):
    from recipes.mxnet import digits

    counts = {}
    for network in ("lenet", "mlp"):
        symbol = digits.network(network, 10)
        shapes, _, _ = symbol.infer_shape(data=(2, 1, 28, 28), softmax_label=(2,))
        counts[network] = sum(map(np.prod, shapes[1:-1]))
    assert counts == {"lenet": 431_080, "mlp": 109_386}
    names = digits.network("lenet", 10).list_arguments()
    layers = ("convolution0", "convolution1", "fullyconnected0", "fullyconnected1")
    assert names == ["data", *(f"{layer}_{kind}" for layer in layers for kind in ("weight", "bias")), "softmax_label"]


@pytest.mark.mxnet
def test_devices_share_a_batch(mx, digits, tmp_path, capfd):
    from recipes.mxnet import module_fit

    assert module_fit.shares(10, [1.0, 1.0, 1.0]) == [3, 3, 4]
    with pytest.raises(ValueError, match="leaves a device without images of a batch of 4"):
        module_fit.shares(4, [100.0, 1.0])
    one = train(digits, tmp_path / "one", f"{FIVE} --batch-size 32")
    capfd.readouterr()
    two = train(digits, tmp_path / "two", f"{FIVE} --batch-size 32 --cpus 2 --work-load-list 3,1")
    assert "a batch: 24 on cpu(0), 8 on cpu(1)" in capfd.readouterr().err
    assert_close(two, one, 1e-5)
    with pytest.raises(ValueError, match=r"--gpus 0,2: (this MXNet was built for CPUs only|MXNet sees)"):
        train(digits, tmp_path / "gpu", "--gpus 0,2")


@pytest.mark.long
@pytest.mark.mxnet
def test_an_interrupted_run_goes_on(mx, digits, tmp_path):
    """To the same bits without momentum, which .params files do not hold; the rate falls where it would have."""
    plain = "--batch-size 50 --mom 0 --lr-step-epochs 1,3"
    whole = train(digits, tmp_path / "m", f"{plain} --num-epochs 4")
    for name in ("symbol.json", "0002.params"):
        (tmp_path / f"m-{name}").rename(tmp_path / f"parts-{name}")
    parts = train(digits, tmp_path / "parts", f"{plain} --num-epochs 4 --load-epoch 2 --save-period 2")
    assert sorted(path.name for path in tmp_path.glob("parts-*")) == [
        "parts-0002.params", "parts-0004.params", "parts-symbol.json",
    ]  # fmt: skip
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    with pytest.raises(ValueError, match=r"parts-0002.params .* convolution0_weight"):
        train(digits, tmp_path / "parts", "--network lenet --load-epoch 2")
    with pytest.raises(ValueError, match=r"--load-epoch 3: there is no .*/parts-0003.params"):
        train(digits, tmp_path / "parts", "--load-epoch 3")
    with pytest.raises(FloatingPointError, match=r"NaN or Inf after epoch 0.*--lr"):
        train(digits, tmp_path / "nan", "--lr 1e30")
    assert not list(tmp_path.glob("nan*"))


@pytest.mark.mxnet
def test_stores_that_would_wait_or_train_alone(mx):
    from recipes.mxnet.kvstore import check_started_for

    job = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "a", "DMLC_PS_ROOT_PORT": "1"}
    check_started_for("dist_sync", {**job, "DMLC_ROLE": "worker"})
    with pytest.raises(ValueError, match=r"needs a scheduler and servers; not set here: .*`partial-fc launch"):
        check_started_for("dist_sync", {})
    with pytest.raises(ValueError, match=r"not set here: DMLC_PS_ROOT_URI\."):
        check_started_for("dist_async", {**job, "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": ""})
    with pytest.raises(ValueError, match="MXNET_UPDATE_ON_KVSTORE=0 with --kv-store dist_async"):
        check_started_for("dist_async", {**job, "DMLC_ROLE": "worker", "MXNET_UPDATE_ON_KVSTORE": "0"})
    with pytest.raises(ValueError, match=r"2 workers.*--kv-store device"):
        check_started_for("device", {**job, "DMLC_ROLE": "worker"})
    with pytest.raises(ValueError, match="DMLC_ROLE is 'serv'"):
        check_started_for("local", {"DMLC_ROLE": "serv"})
    with pytest.raises(ValueError, match=r"mpirun \(Open MPI\) started 2 processes, but --kv-store local is for one"):
        check_started_for("local", {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {
            f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")
        })  # fmt: skip


# ---- jobs of several processes


def recipe(flags: str) -> list[str]:
    return [sys.executable, "train.py", "mnist", "--engine", "mxnet", *shlex.split(flags)]


def launch(command: list[str], num_servers: int = 1) -> str:
    words = ["launch", "-n", "2", "-s", str(num_servers), "--launcher", "local"]
    return run([sys.executable, "-m", "partial_fc", *words, *command])


@pytest.fixture(scope="module")
def large_batch(mx, digits, tmp_path_factory) -> dict[str, np.ndarray]:
    """What one process learns from the whole batches."""
    return train(digits, tmp_path_factory.mktemp("single") / "m", f"{FIVE} --batch-size 32 --kv-store local")


@pytest.mark.mxnet
def test_dist_sync_of_two_workers_is_one_with_their_batches(mx, digits, tmp_path, large_batch):
    prefix = tmp_path / "m"
    flags = f"{FIVE} --batch-size 16 --disp-batches 2 --kv-store dist_sync --data-dir {digits} --model-prefix {prefix}"
    printed = launch(recipe(flags), num_servers=2)
    for rank, own in enumerate((prefix, tmp_path / "m-1")):
        assert_close(weights(mx, Path(f"{own}-0001.params")), large_batch, 1e-5)
        assert f"Node[{rank}] Resizing training data to 5 batches per machine" in printed
        assert re.search(rf"Node\[{rank}\] Epoch\[0\] Batch \[0-2\]\tSpeed: [\d.]+ samples/sec\taccuracy=\d\.", printed)


@pytest.mark.long
@pytest.mark.mxnet
def test_two_bits_follow_their_rule_and_train(mx, digits, tmp_path):
    """1.9.1 itself ends here: "Compression not supported with PushPull"."""
    flags = (
        "--network mlp --kv-store dist_sync --gc-type 2bit --gc-threshold 0.1 --batch-size 16 --num-epochs 6 --loss ce"
    )
    command = [sys.executable, "-m", kvstore_job.__name__, str(tmp_path / "pulls"), "--data-dir", str(digits)]
    printed = launch([*command, *shlex.split(flags)])
    gradient, t = kvstore_job.GRADIENT, np.float32(kvstore_job.THRESHOLD)
    residuals = [np.zeros_like(gradient) for _ in range(2)]
    for number in range(kvstore_job.NUM_PUSHES):
        total = np.zeros_like(gradient)
        for rank, residual in enumerate(residuals):
            residual += gradient * np.float32(1 + rank)
            left = np.where(residual >= t, t, np.where(residual <= -t, -t, np.float32(0)))
            residual -= left
            total += left
        for rank in range(2):
            assert np.array_equal(np.load(tmp_path / f"pulls-{rank}.npy")[number], total)
    assert_falls(printed)


@pytest.mark.long
@pytest.mark.mxnet
def test_dist_async_learns(mx, digits):
    flags = f"--kv-store dist_async --data-dir {digits} --batch-size 16 --num-epochs 6 --lr 0.01 --loss ce"
    assert_falls(launch(recipe(flags)))


def assert_falls(printed: str) -> None:
    for rank in range(2):
        losses = [float(loss) for loss in re.findall(rf"Node\[{rank}\].*Train-cross-entropy=(.*)", printed)]
        assert len(losses) == 6
        assert losses[-1] < losses[0] / 2


@pytest.mark.mxnet
def test_a_worker_does_not_wait_for_ever(mx):
    """For a server that is missing: something listens where the scheduler should, and says nothing."""
    from recipes.mxnet.kvstore import absent

    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        port = str(scheduler.getsockname()[1])
        job = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_TASK_ID": "1"}
        job |= {"DMLC_PS_ROOT_PORT": port, "DMLC_ROLE": "worker", "DMLC_NODE_HOST": "127.0.0.1"}
        variables = (f"{name}={value}" for name, value in job.items())
        printed = run(["env", *variables, *recipe("--kv-store dist_sync --start-timeout 1")], expect=1)
    words = (
        rf"worker 1 on \S+ waited 1 s \(--start-timeout\) .* scheduler at 127.0.0.1:{port} answers, .* 1 server\(s\)"
    )
    assert re.search(words, printed)
    assert "does not answer (Connection refused): did it start" in absent(1, job)
