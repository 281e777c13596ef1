"""All readers of files that come from elsewhere, by name: small valid files, and how they are read."""

import argparse
import contextlib
import functools
import gzip
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm  # noqa: F401  imported here, not by the first file that names a network of it: its import makes folders
import torch
from safetensors.torch import save_file

from demo.make_digits import write_idx
from partial_fc import models
from partial_fc.checkpoint.class_names import read_names
from partial_fc.comm.launch import hosts
from partial_fc.data.decode import cv2, decode
from partial_fc.data.idx import read_set
from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.pairs import read_pairs
from partial_fc.data.recordio import MAGIC, RecordSource, RecordWriter, pack
from partial_fc.data.sample import BadRecord, Source
from partial_fc.data.vectors import Vectors
from partial_fc.embedding.load import find
from partial_fc.files import read_bytes
from partial_fc.foreign import arcface_torch, ndarray_file
from partial_fc.foreign.state_dicts import check_fits, load_state, read_weights
from partial_fc.models.iresnet import IResNet
from partial_fc.verbs.checkpoint.imprint import from_file
from partial_fc.verbs.data.pair_list import read_pair_list
from partial_fc.verbs.model.embed import unit_rows
from partial_fc.verbs.model.ijb import Ijb
from recipes.face import arcface_torch as arcface_torch_config
from recipes.imagenet.databases.records import INT32, STRING, Datum, TensorProtos, read_record
from recipes.kinetics.video.clip_list import ClipList
from recipes.kinetics.video.frames import VideoFile
from recipes.mnist import apex
from recipes.mxnet import symbol_file as mxnet_symbol
from recipes.mxnet.launch import job
from tests.recipes.kinetics import videos
from tests.recipes.mxnet.mxnet_network import recipe_symbol

Files = Mapping[str, bytes]
Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Reader:
    """changed: the one file of a seed that is changed; none: any. words: of the format. inside: changes what a
    length or compression holds together, and puts that in order, so that what is changed is read at all."""

    seeds: Callable[[], list[Files]]
    read: Callable[[Path], Any]
    words: tuple[bytes, ...] = ()
    inside: Callable[[bytes, Change], bytes] = lambda data, change: change(data)
    changed: str = ""


def written(write: Callable[[Path], Any]) -> dict[str, bytes]:
    """The files that `write` makes in a folder."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def named(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """With the names that every source puts before what is wrong with a record."""

    def reading(folder: Path) -> None:
        try:
            read(folder)
        except BadRecord as error:
            raise BadRecord(f"{folder}: {error}") from error

    return reading


def saved(value: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return out.getvalue()


def in_gzip(data: bytes, change: Change) -> bytes:
    return gzip.compress(change(gzip.decompress(data)), 1, mtime=0) if data[:2] == b"\x1f\x8b" else change(data)


def in_zip(data: bytes, change: Change) -> bytes:
    """The pickle of torch.save, or the first array of numpy.savez."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as new:
        names = archive.namelist()
        changed = next((name for name in names if name.endswith(".pkl")), names[0])
        for name in names:
            content = archive.read(name)
            new.writestr(name, change(content) if name == changed else content)
    return out.getvalue()


def in_header(data: bytes, change: Change) -> bytes:
    """The JSON of a safetensors file, with its length."""
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def image(suffix: str = ".png") -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), np.uint8)
    return bytes(cv2.imencode(suffix, pixels)[1].tobytes())


def records(*records: tuple[int, bytes]) -> dict[str, bytes]:
    def write(folder: Path) -> None:
        with RecordWriter(folder / "train.rec") as writer:
            for key, record in records:
                writer.write(key, record)

    return written(write)


def record_files() -> list[Files]:
    """im2rec's layout, one record split at a magic number; InsightFace's, with identity records and a property file."""
    identity = [(0, pack([2.0, 3.0], b"")), (1, pack([0.0, 1.0], image(), 1)), (2, pack([1.0, 2.0], b""))]
    split = (7, pack(1.0, b"abcd" + MAGIC.to_bytes(4, "little") + b"xy", 7))
    return [records((0, pack(2.0, image(), 0)), split), {**records(*identity), "property": b"2,8,8\n"}]


def read_all(source: Source) -> None:
    """Labels in one go, and samples, which say the same of each."""
    with contextlib.closing(source) if hasattr(source, "close") else contextlib.nullcontext():
        label_N = source.labels()
        for index in range(min(len(source), 50)):
            label = source.read(index).label
            assert label_N is None or label == label_N[index], f"labels() says {label_N[index]}, read() {label}"


def idx_files() -> list[Files]:
    def write(folder: Path) -> None:
        write_idx(folder / "t10k-images-idx3-ubyte", np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
        write_idx(folder / "t10k-labels-idx1-ubyte", np.array([3, 9], np.uint8))

    plain = written(write)
    return [plain, {name: gzip.compress(content, mtime=0) for name, content in plain.items()}]


def pair_files() -> list[Files]:
    """As other programs write them: bytes, arrays, arrays of objects and NumPy's booleans."""
    images, array = [b"\xff\xd8 one", b"two\x00"], [np.arange(6, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    values = ((images, [True]), (array, np.array([True])), (np.array(images, object), [np.bool_(False)]))
    return [{"a.bin": pickle.dumps(value, protocol)} for value in values for protocol in (0, 2, 4, 5)]


@cache
def database_files() -> list[Files]:
    both = TensorProtos()
    both.protos.add(data_type=STRING, string_data=[image()])
    both.protos.add(data_type=INT32, int32_data=[2])
    boxed = Datum(channels=3, height=4, width=5, data=bytes(60), label=1)
    return [{"record": record.SerializeToString()} for record in (boxed, both)]


@cache
def video_files() -> list[Files]:
    return [written(lambda folder: videos.write(folder / "a.mp4", 12, {}, codec="libx264"))]


def read_clips(folder: Path) -> None:
    clips = ClipList(folder / "clips.txt", folder, 5, videos=True)
    clips.labels()


CONFIG = b"""from easydict import EasyDict as edict
config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "r50"
config.batch_size = 2 ** 7 * 3 // 3
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ['lfw', "cfp_fp"]
config.lr = -(-0.1)
"""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def weight_files(zipped: bool) -> list[Files]:
    return [{"model.pt": saved(network().state_dict(), _use_new_zipfile_serialization=zipped)}]


def whole_files() -> list[Files]:
    """A whole module, and a checkpoint of Lightning's whose hyper-parameters are objects."""
    objects = {
        "args": argparse.Namespace(lr=0.1, out=Path("/runs")),
        "n": np.float32(3),
        "f": functools.partial(max, 3),
    }
    checkpoint = {"state_dict": network().state_dict(), "hyper_parameters": objects}
    return [{"model.pt": saved(value)} for value in (network(), checkpoint)]


def read_model(folder: Path) -> None:
    load_state(network(), read_weights(folder / "model.pt")[0], folder / "model.pt")


def trained(module: torch.nn.Module) -> dict[str, Any]:
    """The state of an optimizer that has made a step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in module.parameters()).backward()
    optimizer.step()
    return optimizer.state_dict()


def apex_files() -> list[Files]:
    amp = {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    module = network()
    return [{"amp.pt": saved({"model": module.state_dict(), "optimizer": trained(module), "amp": amp})}]


def read_apex(folder: Path) -> None:
    found, module = apex.read(folder / "amp.pt"), network()
    check_fits(found.model, module.state_dict(), found.path, "model")
    module.load_state_dict(found.model)
    apex.load_optimizer(found, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


def arcface_files() -> list[Files]:
    head = torch.nn.Linear(2, 3, bias=False)
    parts = {"state_dict_softmax_fc": {"weight": head.weight.detach()}, "state_optimizer": trained(head)}
    return [{"checkpoint_gpu_0.pt": saved({"epoch": 1, "global_step": 5, "state_dict_backbone": {}, **parts})}]


def read_arcface(folder: Path) -> None:
    arcface_torch.from_checkpoint(folder / "checkpoint_gpu_0.pt")
    arcface_torch.backbone_of(folder / "checkpoint_gpu_0.pt", ())


def ndarray_files() -> list[Files]:
    """Two arrays, with names and without."""
    array = torch.arange(6.0).view(3, 2)
    both = ([array, array], {"one": array, "two": array})
    return [written(lambda folder, of=of: ndarray_file.write(folder / "0_centers.param", of)) for of in both]


def symbol_files() -> list[Files]:
    small = IResNet((1,), 4, 16, widths=(4,), strides=(1, 2))
    return [{"model-symbol.json": recipe_symbol(small).encode()}]


def numpys(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    out = io.BytesIO()
    save(out, *arrays, **named)
    return out.getvalue()


def npz_files() -> list[Files]:
    names = np.array(["x", "é"])
    return [{"x.npz": numpys(np.savez, embeddings=np.eye(3, 4, dtype="f"), labels=np.arange(3), class_names=names)}]


@cache
def model_files() -> list[Files]:
    facts = {"network": "tiny", "embedding_size": "4", "image_size": "56", "flip": "true", "step": "3"}
    weights = models.build("tiny", 4, 56).state_dict()
    return [written(lambda folder: save_file(weights, folder / "model.safetensors", facts))]


_POINTS = b" 38.3 51.7 73.5 51.5 56.0 71.7 41.5 92.4 70.7 92.2 0.9\n"
IJB = {
    "ijbc_name_5pts_score.txt": b"1.png" + _POINTS + b"2.png" + _POINTS + b"3.png" + _POINTS,
    "ijbc_face_tid_mid.txt": b"1.png 7 70\n2.png 8 71\n3.png 9 71\n",
    "ijbc_template_pair_label.txt": b"7 8 1\n7 9 0\n",
    "ijbc_1N_gallery_G1.csv": b"T,S,F\n7,1,1.png\n",
    "ijbc_1N_gallery_G2.csv": b"T,S,F\n8,2,2.png\n",
    "ijbc_1N_probe_mixed.csv": b"T,S,F\n9,1,3.png\n",
}
IMAGES = dict.fromkeys(("a.png", "b.png"), b"")
LST = {"a": b"a.png 0\na.png 1\n\nb.png\t2\n", **IMAGES}
PAIRS = {"p.txt": b"a.png b.png 1\nb.png\ta.png\t0\n", **IMAGES}
HOSTS = {"hosts": b"# ours\nip1:22\n10.0.0.2 slots=8\n\n"}
CSV = {"a.csv": b"first,second,same\na.png,b.png,1\nb.png,a.png,different\n", **IMAGES}


def read_ijb(folder: Path) -> None:
    """Its lists are in a folder below."""
    if not (folder / "meta").exists():
        (folder / "meta").symlink_to(folder.resolve())
    assert Ijb(folder, "IJBC", 112).galleries


_MOST = b"\xff\xff\xff\x7f"
_CALLS = (
    *(b"cos\nsystem\n", b"cposix\nmkdir\n", b"cbuiltins\nexec\n", b"iposix\nsystem\n", b"X\x03\x00\x00\x00pwn"),
    *(b"(X\x0a\x00\x00\x00touch pwned\x85R", b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R", b"T" + _MOST, b"\x8b" + _MOST),
    *(b"h\x00", b"\x94", b"\x85R", b"R", b"b", b"o", b"\x81", b"0", b"(", b"e", b"u", b"}", b"]", b"N", b"Q", b"."),
)
_JSON = (b"null", b"{}", b"[]", b"[" * 3000, b"NaN", b"1e999", b'"x"', b"BF16", b'"shape":[9223372036854775807,4]')
_LISTED = (b"\t2\t", b"x" * 300, b"\x0c", b'"', b"slots=", b":", b"-oProxyCommand=touch pwned", b"$(touch pwned)")
_CODE = (b"**64", b"//0", b"(" * 90, b"[" * 900, b"{1: 2}", b"__import__('os').mkdir('pwned')", b"# coding: rot13\n")
_NPY = (b"'shape': (1000000000000, 32)", b"'descr': '|O'", b"(" * 4000, b"<U9", b"True", b"-1", b",")
_BOXES = (b"moov", b"mdat", b"stsz", b"stts", b"stsc", b"stco", b"ctts", b"elst", b"avcC", b"stss")
_SEGMENTS = (b"\xff\xc2", b"\xff\xc0", b"\xff\xda", b"\xff\xd9", b"\xff\xff", b"\xff\xda\x00")

READERS = {
    "rec": Reader(record_files, lambda f: read_all(RecordSource(f)), (MAGIC.to_bytes(4, "little"), b"\t", b"0\t0\n")),
    "idx": Reader(idx_files, lambda f: read_set(f, "t10k"), (), in_gzip),
    "bin": Reader(pair_files, lambda f: read_pairs(f / "a.bin"), _CALLS),
    "list": Reader(lambda: [LST], named(lambda f: read_all(ImageFolder(list_file=f / "a"))), _LISTED, changed="a"),
    "pair-list": Reader(lambda: [PAIRS], lambda f: read_pair_list(f / "p.txt").digest(), _LISTED, changed="p.txt"),
    "image": Reader(
        lambda: [{"image": image(suffix)} for suffix in (".jpg", ".png", ".bmp", ".webp", ".gif", ".tiff")],
        named(lambda f: decode(read_bytes(f / "image", 1 << 30))), _SEGMENTS,
    ),
    "record": Reader(database_files, named(lambda f: read_record(read_bytes(f / "record", 1 << 30)))),
    "video": Reader(
        video_files, named(lambda f: [*VideoFile(f / "a.mp4").read(lambda count: [0, count // 2, count - 1])]), _BOXES
    ),
    "clips": Reader(lambda: [{"clips.txt": b"a.mp4 12 0\nb/c 3 1\n"}], read_clips, _LISTED),
    "config": Reader(lambda: [{"c.py": CONFIG}], lambda f: arcface_torch_config.load(f / "c.py"), _CODE),
    "apex": Reader(apex_files, read_apex, _CALLS, in_zip),
    "weights": Reader(lambda: weight_files(True), read_model, _CALLS, in_zip),
    "old-weights": Reader(lambda: weight_files(False), read_model, _CALLS),
    "whole": Reader(whole_files, read_model, _CALLS, in_zip),
    "arcface": Reader(arcface_files, read_arcface, _CALLS, in_zip),
    "mxnet-params": Reader(ndarray_files, lambda f: ndarray_file.read(f / "0_centers.param")),
    "mxnet-symbol": Reader(symbol_files, lambda f: mxnet_symbol.read(f / "model-symbol.json").batch_norm("fc1"), _JSON),
    "npy": Reader(lambda: [{"x": numpys(np.save, np.ones((3, 4), "<f4"))}], lambda f: from_file(f / "x", 4), _NPY),
    "npz": Reader(npz_files, lambda f: unit_rows([Vectors(f / "x.npz")]), _NPY, in_zip),
    "model": Reader(model_files, lambda f: find(f / "model.safetensors").model(), _JSON, in_header),
    "pairs-csv": Reader(lambda: [CSV], lambda f: read_pair_list(f / "a.csv").digest(), _LISTED, changed="a.csv"),
    "ijb": Reader(lambda: [IJB], read_ijb, _LISTED),
    "names": Reader(lambda: [{"names.txt": "alice\nbób\n".encode()}], lambda f: read_names(f / "names.txt"), _LISTED),
    "hosts": Reader(lambda: [HOSTS], lambda f: hosts.parse(str(f / "hosts")), _LISTED),
    "launcher-hosts": Reader(lambda: [HOSTS], lambda f: job.read_hosts(f / "hosts"), _LISTED),
}  # fmt: skip
