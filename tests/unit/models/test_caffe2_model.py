"""Caffe2's .mdl files: written by an independent script with the real field types, and by ours."""

import random

import numpy as np
import pytest
import torch

from partial_fc.data.databases import minidb
from partial_fc.data.databases.records import build_messages
from partial_fc.foreign import caffe2_model
from partial_fc.models import resnet
from partial_fc.optim.backbone import build, load_named_state, named_state, set_lr

# As caffe2.proto has it; caffe2_model.py reads packed floats as bytes.
PROTO = build_messages(
    "test_caffe2_model",
    {
        "Device": [(1, "device_type", "int32"), (2, "cuda_gpu_id", "int32")],
        "Segment": [(1, "begin", "int64"), (2, "end", "int64")],
        "TensorProto": [
            (1, "dims", "int64*"),
            (2, "data_type", "int32"),
            (3, "float_data", "float packed"),
            (4, "int32_data", "int32 packed"),
            (5, "byte_data", "bytes"),
            (7, "name", "string"),
            (8, "device_detail", "Device"),
            (10, "int64_data", "int64 packed"),
            (11, "segment", "Segment"),
        ],
        "BlobProto": [
            (1, "name", "string"),
            (2, "type", "string"),
            (3, "tensor", "TensorProto"),
            (4, "content", "bytes"),
        ],
    },
)
BlobProto = PROTO["BlobProto"]
COLUMNS = {np.float32: (1, "float_data"), np.int64: (10, "int64_data"), np.float16: (12, "int32_data")}


def caffe2_names(depths=(3, 4, 6, 3), num_labels=1000, groups=1, base=64):
    """Blob -> shape, in the order in which caffe2/python/models/resnet.py makes them."""
    shapes = {"conv1_w": (64, 3, 7, 7)}

    def spatial_bn(name, width):
        shapes.update({f"{name}_{blob}": (width,) for blob in ("s", "b", "rm", "riv")})

    spatial_bn("conv1_spatbn_relu", 64)
    width_in, count = 64, 0
    for stage, depth in enumerate(depths):
        inner, out = groups * base * 2**stage, 256 * 2**stage
        for _ in range(depth):
            kernels = [(inner, width_in, 1, 1), (inner, inner // groups, 3, 3), (out, inner, 1, 1)]
            for index, shape in enumerate(kernels, start=1):
                shapes[f"comp_{count}_conv_{index}_w"] = shape
                spatial_bn(f"comp_{count}_spatbn_{index}", shape[0])
            if out != width_in:
                shapes[f"shortcut_projection_{count}_w"] = (out, width_in, 1, 1)
                spatial_bn(f"shortcut_projection_{count}_spatbn", out)
            width_in, count = out, count + 1
    last = f"last_out_L{num_labels}"
    return shapes | {f"{last}_w": (num_labels, 2048), f"{last}_b": (num_labels,)}


def records(name, value, chunk=1_000_000):
    """As TensorSerializer writes a blob of the first GPU."""
    number, column = COLUMNS[value.dtype.type]
    flat = value.reshape(-1)
    if value.dtype == np.float16:
        flat = flat.view(np.uint16)
    for place, begin in enumerate(range(0, max(flat.size, 1), chunk)):
        blob = BlobProto(name=name, type="Tensor")
        tensor, piece = blob.tensor, flat[begin : begin + chunk]
        tensor.dims.extend(value.shape)
        tensor.data_type, tensor.name = number, name
        tensor.device_detail.device_type = 1
        tensor.segment.begin, tensor.segment.end = begin, begin + len(piece)
        getattr(tensor, column).extend(piece.tolist())
        yield f"{name}#%{place}".encode(), blob.SerializeToString()


def small_network(**more):
    return resnet.build("resnet50", 3, width_per_group=1, **more)


@pytest.fixture(scope="module")
def blobs():
    """A ResNeXt so narrow that a whole file is 12 MB."""
    rng = np.random.default_rng(0)
    shapes = caffe2_names(num_labels=3, base=1)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def theirs(blobs):
    """All records of a file of Caffe2's, with what else GetCheckpointParams saves."""
    meta = BlobProto(name="!!META_NET_DEF", type="std::string", content=b"\x12\x00nets")
    items = [(b"!!META_NET_DEF", meta.SerializeToString())]
    for name, value in blobs.items():
        items += records(f"gpu_0/{name}", value)
        if not name.endswith(("_rm", "_riv")):
            items += records(f"gpu_0/{name}_momentum", value * 2)
    for name, value in (("gpu_0/ONE_1_0", np.ones(1, np.float32)), ("gpu_0/wd_1_0", np.ones(1, np.float32))):
        items += records(name, value)
    return items + list(records("optimizer_iteration", np.array([7030], np.int64)))


def written(folder, items):
    minidb.write(folder / "resnet50_model_3.mdl", items)
    return folder / "resnet50_model_3.mdl"


def test_all_parameters_of_resnet50_have_their_blob():
    with torch.device("meta"):
        state = resnet.build("resnet50").state_dict()
    names = caffe2_model.blob_names(state)
    assert {blob: tuple(state[name].shape) for name, blob in names.items()} == caffe2_names()
    assert names.keys() == {name for name in state if not name.endswith("num_batches_tracked")}
    parameters = [name for name in names if not name.endswith(("running_mean", "running_var"))]
    assert sum(state[name].numel() for name in parameters) == 25_557_032
    for name, groups, base in (("resnet101", 32, 4), ("resnet152", 1, 64)):
        with torch.device("meta"):
            state = resnet.build(name, 10, groups=groups, width_per_group=base).state_dict()
        names = caffe2_model.blob_names(state)
        expected = caffe2_names(resnet.NETWORKS[name][1], 10, groups, base)
        assert {blob: tuple(state[n].shape) for n, blob in names.items()} == expected


def test_a_file_of_caffe2s_is_read(tmp_path, blobs, theirs):
    """Its pieces in any order, as its threads leave them."""
    items = theirs[1:]
    random.Random(0).shuffle(items)
    model = small_network()
    found = caffe2_model.read(written(tmp_path, theirs[:1] + items), model.state_dict())
    model.load_state_dict(found.state)
    assert torch.equal(model.conv1.weight, torch.from_numpy(blobs["conv1_w"]))
    assert torch.equal(model.layer1[0].downsample[1].weight, torch.from_numpy(blobs["shortcut_projection_0_spatbn_s"]))
    assert torch.equal(model.layer4[0].downsample[0].weight, torch.from_numpy(blobs["shortcut_projection_13_w"]))
    assert torch.equal(model.layer2[1].bn2.running_mean, torch.from_numpy(blobs["comp_4_spatbn_2_rm"]))
    assert torch.equal(model.layer4[2].bn3.running_var, torch.from_numpy(blobs["comp_15_spatbn_3_riv"]))
    assert torch.equal(model.fc.bias, torch.from_numpy(blobs["last_out_L3_b"]))
    assert found.iteration == 7030
    assert found.left_out == ["ONE_1_0", "wd_1_0"]
    assert found.momentum.keys() == {f"{name}/momentum" for name, _ in model.named_parameters()}
    assert torch.equal(found.momentum["fc.weight/momentum"], 2 * model.fc.weight)


def test_a_float16_file_gives_its_masters(tmp_path, blobs):
    """--dtype float16: parameters as 16-bit numbers in int32_data, masters beside them; batch norms have none."""
    items = []
    for name, value in blobs.items():
        half = name.endswith("_w") or name.startswith("last_out")
        items += records(f"gpu_0/{name}", value.astype(np.float16) if half else value)
        if name.endswith("_w") and name != "conv1_w":
            items += records(f"gpu_0/{name}_fp32", value)
    found = caffe2_model.read(written(tmp_path, items), small_network().state_dict())
    assert torch.equal(found.state["fc.weight"], torch.from_numpy(blobs["last_out_L3_w"]))
    widened = blobs["conv1_w"].astype(np.float16).astype(np.float32)
    assert torch.equal(found.state["conv1.weight"], torch.from_numpy(widened))
    assert found.momentum == {}
    assert found.iteration is None


def test_a_network_without_a_last_layer_leaves_it_out(tmp_path, theirs):
    found = caffe2_model.read(
        written(tmp_path, theirs), resnet.build("resnet50", 0, width_per_group=1).double().state_dict()
    )
    assert "last_out_L3_w" in found.left_out
    assert found.state["conv1.weight"].dtype == torch.float64


def test_round_trip_is_bit_equal_and_training_goes_on(tmp_path):
    """Weights, running statistics, and momentum that carries the rate."""
    torch.manual_seed(0)
    model, again = small_network().double(), small_network().double()
    make = {"nesterov": True, "lr_in_momentum": True}
    optimizer, second = (build("sgd", m, 0.9, 1e-4, decay_biases=False, **make) for m in (model, again))

    def update(network, its_optimizer):
        set_lr(its_optimizer, 0.1)
        its_optimizer.zero_grad()
        network(torch.rand(4, 3, 40, 40, dtype=torch.float64)).square().sum().backward()
        its_optimizer.step()

    update(model, optimizer)
    for state in (model.state_dict(), named_state(optimizer, model)):
        for t in state.values():
            t.copy_(t.float())  # what a file of Caffe2's holds
    path = tmp_path / "resnet50_model_1.mdl"
    caffe2_model.write(path, model.state_dict(), named_state(optimizer, model), iteration=1)
    found = caffe2_model.read(path, again.state_dict())
    again.load_state_dict(found.state)
    load_named_state(second, again, found.momentum)
    assert (found.iteration, found.left_out) == (1, [])
    for one, other in ((model, again), (optimizer, second)):
        if one is model:
            states = one.state_dict(), other.state_dict()
        else:
            states = named_state(one, model), named_state(other, again)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][n], states[1][n]) for n in states[0] if "tracked" not in n)
    for network, its_optimizer in ((model, optimizer), (again, second)):
        torch.manual_seed(1)
        update(network, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_is_written_is_what_caffe2_writes(tmp_path, theirs, blobs):
    """Key for key and value for value, but for the device and the constants; the nets come first."""
    model = small_network()
    state = caffe2_model.read(written(tmp_path, theirs), model.state_dict())
    path = tmp_path / "own.mdl"
    caffe2_model.write(path, state.state, state.momentum, iteration=7030)
    own = list(minidb.read(path))
    assert own[0][0] == b"!!META_NET_DEF"
    meta = BlobProto.FromString(own[0][1])
    assert meta.type == "std::string"
    assert b"GLOBAL_INIT_NET_TYPE" in meta.content
    assert b"gpu_0/conv1_w_momentum" in meta.content
    expected = {key: value for key, value in theirs[1:] if b"ONE" not in key and b"wd_" not in key}
    assert dict(own[1:]).keys() == expected.keys()
    for key, value in own[1:]:
        blob, other = BlobProto.FromString(value), BlobProto.FromString(expected[key])
        other.tensor.ClearField("device_detail")
        assert blob == other, key


def test_a_file_of_another_network_says_what_differs(tmp_path, theirs):
    state = small_network().state_dict()
    without = [item for item in theirs if not item[0].startswith(b"gpu_0/comp_3_conv_2_w")]
    with pytest.raises(ValueError, match=r"model_3.mdl is of another network: 1 missing: comp_3_conv_2_w\. Compare"):
        caffe2_model.read(written(tmp_path, without), state)
    more = theirs + list(records("gpu_0/comp_16_conv_1_w", np.ones((2, 2), np.float32)))
    with pytest.raises(ValueError, match="1 unexpected: comp_16_conv_1_w"):
        caffe2_model.read(written(tmp_path, more), state)
    with pytest.raises(ValueError, match=r"conv1_w is \(64, 3, 7, 7\), expected \(64, 1, 7, 7\)"):
        caffe2_model.read(written(tmp_path, theirs), small_network(in_channels=1).state_dict())
    with pytest.raises(ValueError, match="missing: last_out_L5_w, last_out_L5_b; 2 unexpected: last_out_L3_w"):
        caffe2_model.read(written(tmp_path, theirs), resnet.build("resnet50", 5, width_per_group=1).state_dict())
    with pytest.raises(ValueError, match="50 layers or more"):
        caffe2_model.read(written(tmp_path, theirs), resnet.build("resnet18").state_dict())


def broken(items, key, change):
    """The records with this one's BlobProto changed."""
    made = []
    for k, value in items:
        if k == key:
            blob = BlobProto.FromString(value)
            change(blob.tensor)
            value = blob.SerializeToString()
        made.append((k, value))
    return made


BIG = b"gpu_0/shortcut_projection_13_w#%1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda items: [item for item in items if item[0] != BIG],
            "shortcut_projection_13_w, .* do not make up 2097152",
        ),
        (lambda items: [*items, (b"gpu_0/x_w", b"\xff\xff")], "key b'gpu_0/x_w': no BlobProto"),
        (lambda items: [*items, *records("gpu_1/conv1_w", np.ones(1, np.float32))], "conv1_w and gpu_1/conv1_w"),
        (lambda items: broken(items, BIG, lambda t: t.dims.append(2)), "do not fit shortcut_projection_13_w"),
        (lambda items: broken(items, BIG, lambda t: t.dims.__setitem__(0, -1)), "do not fit"),
        (lambda items: broken(items, b"gpu_0/conv1_w#%0", lambda t: t.dims.append(10**12)), "do not fit conv1_w"),
        (lambda items: broken(items, BIG, lambda t: setattr(t.segment, "begin", 0)), "do not make up"),
        (lambda items: broken(items, BIG, lambda t: setattr(t.segment, "begin", 2_000_000)), "do not fit"),
        (lambda items: broken(items, BIG, lambda t: t.float_data.pop()), "do not make up"),
    ],
)
def test_a_damaged_file_names_the_place(tmp_path, theirs, change, message):
    with pytest.raises(ValueError, match=f"resnet50_model_3.mdl.*{message}"):
        caffe2_model.read(written(tmp_path, change(theirs)), small_network().state_dict())


def test_momentum_of_another_kind_is_refused(tmp_path):
    momentum, state = {"conv1.weight/momentum_buffer": torch.ones(1)}, small_network().state_dict()
    with pytest.raises(ValueError, match=r"'conv1\.weight/momentum_buffer' is not momentum that carries"):
        caffe2_model.write(tmp_path / "x.mdl", state, momentum)
    assert not list(tmp_path.iterdir())
