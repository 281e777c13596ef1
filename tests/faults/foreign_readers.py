"""What other trainers wrote: configurations, weights, Apex's checkpoints."""

import io
import struct
from functools import cache
from pathlib import Path

import numpy as np
import torch

from partial_fc.foreign import apex, arcface_torch, gluoncv, mxnet_ndarray, mxnet_symbol
from partial_fc.foreign.backbone_weights import load_weights
from partial_fc.foreign.state_dicts import check_fits
from partial_fc.models.iresnet import IResNet
from recipes.compat import arcface_torch as arcface_torch_config
from tests.faults.mutations import PICKLE_WORDS, any_bytes, in_pickle, in_zip
from tests.faults.reader import Files, Reader, written

CONFIG = b"""from easydict import EasyDict as edict
config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "r50"
config.sample_rate = 1.0
config.fp16 = True
config.weight_decay = 5e-4
config.batch_size = 2 ** 7 * 3 // 3
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ['lfw', "cfp_fp"]
config.rec = "/train_tmp/ms1m"
config.lr = -(-0.1)
"""


def read_config(folder: Path) -> None:
    arcface_torch_config.load(folder / "config.py")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@cache
def apex_files() -> list[Files]:
    def write(folder: Path) -> None:
        small = model()
        optimizer = torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9)
        small(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        apex.write(folder / "amp.pt", small.state_dict(), optimizer, 2.0**16, 3)

    wrapped = io.BytesIO()
    weights = model().state_dict()
    state = {f"module.{name}": t.half() if t.is_floating_point() else t for name, t in weights.items()}
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    amp = {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "amp": amp}, wrapped)
    return [written(write), {"amp.pt": wrapped.getvalue()}]


@cache
def old_weight_files() -> list[Files]:
    """As torch wrote before 1.6."""
    old = io.BytesIO()
    torch.save(model().state_dict(), old, _use_new_zipfile_serialization=False)
    return [{"model.pt": old.getvalue()}]


def read_apex(folder: Path) -> None:
    found = apex.read(folder / "amp.pt")
    small = model()
    check_fits(found.model, small.state_dict(), found.path, "model")
    small.load_state_dict(found.model)
    apex.load_optimizer(found, torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9))


@cache
def weight_files() -> list[Files]:
    new = io.BytesIO()
    torch.save(model().state_dict(), new)
    return [{"model.pt": new.getvalue()}]


def read_weights(folder: Path) -> None:
    load_weights(model(), folder / "model.pt")


@cache
def mxnet_files() -> list[Files]:
    """Two arrays, with names and without, as MXNet 1.9.1 writes them."""
    array = struct.pack("<Iii2qiii", 0xF993FAC9, 0, 2, 3, 2, 1, 0, 0) + np.arange(6, dtype="<f4").tobytes()
    arrays = struct.pack("<QQQ", 0x112, 0, 2) + 2 * array
    names = b"".join(struct.pack("<Q", len(name)) + name for name in (b"one", b"two"))
    ends = (struct.pack("<Q", 0), struct.pack("<Q", 2) + names)
    return [{"0_centers.param": arrays + end} for end in ends]


def read_mxnet(folder: Path) -> None:
    for values in mxnet_ndarray.read(folder / "0_centers.param").values():
        values.double().sum()


@cache
def symbol_files() -> list[Files]:
    small = IResNet((1,), 4, 16, widths=(4,), strides=(1, 2))
    return [{"model-symbol.json": mxnet_symbol.symbol_json(small).encode()}]


def read_symbol(folder: Path) -> None:
    graph = mxnet_symbol.read(folder / "model-symbol.json")
    assert graph.batch_norm("fc1").eps + graph.input_scale


@cache
def torch_centre_files() -> list[Files]:
    centres = torch.nn.Parameter(torch.ones(3, 2))
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [centres]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    centres.sum().backward()
    optimizer.step()
    parts = {"state_dict_softmax_fc": {"weight": centres.detach()}, "state_optimizer": optimizer.state_dict()}
    out = io.BytesIO()
    torch.save({"epoch": 1, "global_step": 5, "state_dict_backbone": {}, **parts}, out)
    return [{"checkpoint_gpu_0.pt": out.getvalue()}]


def read_torch_centres(folder: Path) -> None:
    arcface_torch.from_checkpoint(folder / "checkpoint_gpu_0.pt")
    arcface_torch.backbone_of(folder / "checkpoint_gpu_0.pt", ())


_SIZES = tuple(struct.pack("<q", size) for size in (0, -1, 2**62, 2**63 - 1))
_CODE = (
    *(b"**", b"**64", b"//0", b"%", b"-", b"(" * 90, b"[" * 90, b"9" * 400, b"1e308", b"{1: 2}", b"**{}", b"f'{1}'"),
    *(b"# coding: " + name + b"\n" for name in (b"rot13", b"utf-7", b"idna", b"undefined")),
    *(b"__import__('os').mkdir('pwned')", b"lambda: 0", b"edict({})", b"config.", b"config = edict()\n"),
    *(b"\\N{BEL}", b"'\\ud800'", b"1j", b"...", b"config.network", b"10**64*10**64"),
)
_CALLS = tuple(PICKLE_WORDS)
_JSON = (
    b"[" * 2000,
    b"{}",
    b"[]",
    b"null",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b'"0"',
    b"\\ud800",
    b"data",
    b"conv0",
)
_TORCH = (in_zip(in_pickle), in_zip(in_pickle), in_zip(any_bytes), in_pickle)


def trained_by_gluon() -> torch.nn.Module:
    return torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 3), "fast_bn1": torch.nn.BatchNorm1d(3)})


def states_files() -> list[Files]:
    """What Gluon's trainer pickles, in its own words: places 0, 1 are the layer's, 2, 3 the batch norm's."""
    arrays = []
    for place, shape in enumerate(((3,), (3, 2), (3,), (3,))):
        content = b"".join(mxnet_ndarray._array_bytes(torch.ones(shape), "momentum"))
        state = b"}\x8c\x06handlecbuiltins\nbytearray\nB" + struct.pack("<I", len(content)) + content + b"\x85Rs"
        arrays.append(b"K" + bytes([place]) + b"cmxnet.ndarray.ndarray\nNDArray\nN\x85R" + state + b"b")
    optimizer = b"cmxnet.optimizer.optimizer\nNAG\n)\x81}\x8c\x0anum_updateK\x02sb"
    return [{"f.states": b"\x80\x04}(" + b"".join(arrays) + b"u" + optimizer + b"\x86."}]


def read_states(folder: Path) -> None:
    gluoncv.read_states(trained_by_gluon(), folder / "f.states")


READERS = (
    Reader("gluon-states", "f.states", states_files, read_states, _CALLS, (in_pickle,)),
    Reader("mxnet-centres", "0_centers.param", mxnet_files, read_mxnet, _SIZES),
    Reader("mxnet-symbol", "model-symbol.json", symbol_files, read_symbol, _JSON),
    Reader("torch-centres", "checkpoint_gpu_0.pt", torch_centre_files, read_torch_centres, _CALLS, _TORCH),
    Reader("config", "config.py", lambda: [{"config.py": CONFIG}], read_config, _CODE),
    Reader("apex", "amp.pt", apex_files, read_apex, _CALLS, _TORCH),
    Reader("weights", "model.pt", weight_files, read_weights, _CALLS, _TORCH),
    Reader("weights-old", "model.pt", old_weight_files, read_weights, _CALLS, (in_pickle,), more_bytes=None),
)
