"""The `.mdl` checkpoints of Caffe2's resnet50_trainer and imagenet_trainer (`--save_model_name`, `--load_model_path`).

A minidb file: "!!META_NET_DEF" first, a serialized MetaNetDef (the nets that load the rest), then blobs by name,

    gpu_0/comp_3_conv_2_w#%0 -> BlobProto {name, type "Tensor", tensor: TensorProto {dims, data_type, segment, data}}

in pieces of a million values numbered after "#%": parameters, running statistics, momentum ("_momentum"), and the
number of updates ("optimizer_iteration"). Running statistics are a mean (_rm) and, despite its name, the variance
itself (_riv). Beside a float16 parameter is its fp32 master ("_fp32"), which is read.

(caffe2/core/blob_serialization.cc, python/predictor/predictor_exporter.py, python/models/resnet.py.)
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from partial_fc.data.databases import minidb, records
from partial_fc.foreign.state_dicts import misfits

_META, _READER, _ITERATION = "!!META_NET_DEF", "!!PREDICTOR_DBREADER", "optimizer_iteration"
_CHUNK = 1_000_000  # values
_FLOAT, _INT64, _FLOAT16 = 1, 10, 12
_BATCH_NORM = {"weight": "s", "bias": "b", "running_mean": "rm", "running_var": "riv"}
_SUFFIXES = ("_w", "_b", "_s", "_rm", "_riv")  # the blobs of a network

_CLASSES = records.build_messages(
    "caffe2_model",
    {
        "Segment": [(1, "begin", "int64"), (2, "end", "int64")],
        "Tensor": [
            (1, "dims", "int64*"),
            (2, "data_type", "int32"),
            (3, "float_data", "bytes"),
            (4, "int32_data", "int32 packed"),
            (5, "byte_data", "bytes"),
            (7, "name", "string"),
            (10, "int64_data", "int64 packed"),
            (11, "segment", "Segment"),
        ],
        "Blob": [(1, "name", "string"), (2, "type", "string"), (3, "tensor", "Tensor"), (4, "content", "bytes")],
        "Operator": [(1, "input", "string*"), (2, "output", "string*"), (4, "type", "string")],
        "Net": [
            (1, "name", "string"),
            (2, "op", "Operator*"),
            (7, "external_input", "string*"),
            (8, "external_output", "string*"),
        ],
        "Nets": [(1, "key", "string"), (2, "value", "Net")],
        "Blobs": [(1, "key", "string"), (2, "value", "string*")],
        "MetaNet": [(1, "blobs", "Blobs*"), (2, "nets", "Nets*")],
    },
)
_Blob: Any = _CLASSES["Blob"]
_MetaNet: Any = _CLASSES["MetaNet"]


@dataclass(frozen=True)
class Caffe2Model:
    """A file's contents for a network. state: its state dict. momentum: '<parameter>/momentum' -> tensor, as in
    `optim.backbone.RateInMomentum`. iteration: updates made, if stated. left_out: blobs outside the network."""

    state: dict[str, Tensor]
    momentum: dict[str, Tensor]
    iteration: int | None
    left_out: list[str]


def blob_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps state-dict names to blobs, for models/resnet.py's networks of 50 layers and more. Raises ValueError for
    others: Caffe2's of 18 and 34 layers are of bottlenecks."""
    if "layer1.0.conv3.weight" not in state:
        raise ValueError("Caffe2's .mdl files are of ResNets and ResNeXts with 50 layers or more; this network is none")
    names = {"conv1.weight": "conv1_w"} | _batch_norm("bn1", "conv1_spatbn_relu")
    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in state if name.startswith("layer"))
    for number, at in enumerate(blocks):
        for place in (1, 2, 3):
            names[f"{at}.conv{place}.weight"] = f"comp_{number}_conv_{place}_w"
            names |= _batch_norm(f"{at}.bn{place}", f"comp_{number}_spatbn_{place}")
        if f"{at}.downsample.0.weight" in state:
            names[f"{at}.downsample.0.weight"] = f"shortcut_projection_{number}_w"
            names |= _batch_norm(f"{at}.downsample.1", f"shortcut_projection_{number}_spatbn")
    if "fc.weight" in state:
        last = f"last_out_L{len(state['fc.weight'])}"
        names |= {"fc.weight": f"{last}_w", "fc.bias": f"{last}_b"}
    return names


def _batch_norm(name: str, blob: str) -> dict[str, str]:
    return {f"{name}.{ours}": f"{blob}_{theirs}" for ours, theirs in _BATCH_NORM.items()}


def read(path: Path, state: Mapping[str, Tensor]) -> Caffe2Model:
    """Reads the values for a network with the state dict `state`, in its dtypes and on its devices. Skips the last
    layer for a network without one (a head with class centres). Raises ValueError for a file of another network, with
    the differences, and for a damaged file."""
    names, blobs = blob_names(state), _read_blobs(path)
    expected = {blob: state[name] for name, blob in names.items()}
    last_layer = ("last_out_",) if "fc.weight" not in state else ()
    of_a_network = {
        blob: t
        for blob, t in blobs.items()
        if blob in expected or (blob.endswith(_SUFFIXES) and not blob.startswith(last_layer))
    }
    if problems := misfits(of_a_network, expected):
        raise ValueError(
            f"{path} is of another network: {problems}. Compare --num_labels, --num_layers, --num_channels and "
            "--resnext_* with the run that wrote it"
        )
    momentum = {
        f"{name}/momentum": blobs[f"{blob}_momentum"].to(state[name])
        for name, blob in names.items()
        if f"{blob}_momentum" in blobs
    }
    iteration = int(blobs[_ITERATION].flatten()[0]) if _ITERATION in blobs else None
    taken = {*expected, *(f"{blob}_momentum" for blob in expected), _ITERATION}
    own = {name: blobs[names[name]].to(t) if name in names else t for name, t in state.items()}
    return Caffe2Model(own, momentum, iteration, sorted(blobs.keys() - taken))


def write(
    path: Path,
    state: Mapping[str, Tensor],
    momentum: Mapping[str, Tensor] | None = None,
    iteration: int = 0,
    device: str = "gpu_0",
) -> None:
    """Writes a file that Caffe2's trainers load (without prediction net), atomically. momentum:
    `optim.backbone.named_state` of RateInMomentum, else ValueError. device: Caffe2's prefix of each name."""
    names = blob_names(state)
    tensors = {f"{device}/{blob}": state[name] for name, blob in names.items()}
    for full_name, t in (momentum or {}).items():
        name, _, kind = full_name.rpartition("/")
        if kind != "momentum" or name not in names:
            raise ValueError(f"{path}: optimizer state {full_name!r} is not momentum that carries the learning rate")
        tensors[f"{device}/{names[name]}_momentum"] = t
    minidb.write(path, _pairs(tensors, iteration))


def _pairs(tensors: Mapping[str, Tensor], iteration: int) -> Iterator[tuple[bytes, bytes]]:
    meta = _Blob(name=_META, type="std::string", content=_meta_net([*tensors, _ITERATION]))
    yield _META.encode(), meta.SerializeToString()
    for name, t in tensors.items():
        value = t.detach().to("cpu", torch.float32).numpy().astype("<f4", copy=False).reshape(-1)
        for number, begin in enumerate(range(0, len(value), _CHUNK)):
            piece = value[begin : begin + _CHUNK]
            yield _record(name, number, t.shape, begin, len(piece), data_type=_FLOAT, float_data=piece.tobytes())
    yield _record(_ITERATION, 0, (1,), 0, 1, data_type=_INT64, int64_data=[iteration])


def _record(name: str, number: int, shape: Sequence[int], begin: int, count: int, **values: Any) -> tuple[bytes, bytes]:
    """Returns one piece of a blob: values begin to begin + count - 1."""
    blob = _Blob(name=name, type="Tensor", tensor={"dims": shape, "name": name, **values})
    blob.tensor.segment.begin, blob.tensor.segment.end = begin, begin + count
    return f"{name}#%{number}".encode(), blob.SerializeToString()


def _meta_net(names: Iterable[str]) -> bytes:
    """Returns the nets that LoadModel of Caffe2's trainers runs: an empty one, then one Load operator for all blobs."""
    meta = _MetaNet()
    meta.nets.add(key="PREDICT_INIT_NET_TYPE").value.name = "predict-init"
    load = meta.nets.add(key="GLOBAL_INIT_NET_TYPE").value
    load.name = "global-init"
    load.op.add(type="Load", input=[_READER], output=names)
    load.external_input.append(_READER)
    load.external_output.extend(load.op[0].output)
    meta.blobs.add(key="PARAMETERS_BLOB_TYPE", value=load.op[0].output)
    return meta.SerializeToString()


def _read_blobs(path: Path) -> dict[str, Tensor]:
    """Returns blob without its device -> value; float16 ones without an fp32 master are widened."""
    values: dict[str, np.ndarray] = {}
    pieces: dict[str, list[tuple[int, int]]] = {}  # by blob, in any order: Caffe2 writes with many threads
    full_names: dict[str, str] = {}
    for key, content in minidb.read(path):
        blob = _Blob()
        try:
            blob.ParseFromString(content)
        except DecodeError:
            raise ValueError(f"{path}, key {key!r}: no BlobProto; the file is damaged, or no .mdl of Caffe2") from None
        piece = _piece(path, key, blob.tensor) if blob.type == "Tensor" else None
        if piece is None:
            continue
        full_name = key.decode("utf-8", "replace").partition("#%")[0]
        name, shape = full_name.rpartition("/")[2], tuple(blob.tensor.dims)
        if full_names.setdefault(name, full_name) != full_name:
            raise ValueError(f"{path} has {full_names[name]} and {full_name}: expected the blobs of one device")
        begin = blob.tensor.segment.begin
        end = begin + len(piece)
        if name not in values and min(shape, default=1) >= 0 and math.prod(shape) <= path.stat().st_size:
            values[name] = np.empty(shape, piece.dtype)
        if name not in values or values[name].shape != shape or not 0 <= begin <= end <= values[name].size:
            raise ValueError(f"{path}, key {key!r}: values {begin} to {end} do not fit {name} of shape {shape}")
        values[name].reshape(-1)[begin:end] = piece
        pieces.setdefault(name, []).append((begin, end))
    for name, value in values.items():
        ends = [0, *(end for _, end in sorted(pieces[name]))]
        if [begin for begin, _ in sorted(pieces[name])] != ends[:-1] or ends[-1] != value.size:
            raise ValueError(
                f"{path}: the pieces of {name}, {sorted(pieces[name])}, do not make up {value.size} values"
            )
    masters = {name: values.pop(f"{name}_fp32") for name in list(values) if f"{name}_fp32" in values}
    return {name: torch.from_numpy(value) for name, value in (values | masters).items()}


def _piece(path: Path, key: bytes, tensor: Any) -> np.ndarray | None:
    """Returns the flat values of one record; None for a type that networks do not use."""
    if tensor.data_type == _INT64:
        return np.array(tensor.int64_data, np.int64)
    if tensor.data_type not in (_FLOAT, _FLOAT16):
        return None
    dtype = np.dtype("<f4" if tensor.data_type == _FLOAT else "<f2")
    content = tensor.float_data if tensor.data_type == _FLOAT else tensor.byte_data
    if tensor.int32_data and tensor.data_type == _FLOAT16:
        content = np.array(tensor.int32_data, np.int32).astype("<u2").tobytes()
    if len(content) % dtype.itemsize:
        raise ValueError(f"{path}, key {key!r}: {len(content)} bytes are no row of {dtype.name} numbers")
    return np.frombuffer(content, dtype).astype(np.float32)
