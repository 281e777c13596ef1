"""Files that once crashed a reader, hung it, filled the memory, or gave an error without a name; now it has words."""

import gzip
import io
import json
import struct
import tarfile
import warnings
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch

from partial_fc.data.decode import fit
from partial_fc.data.recordio import MAGIC, RecordReader, RecordSource, pack, write_index
from partial_fc.data.sample import BadRecord
from tests.faults.checkpoint_readers import checkpoint_files
from tests.faults.data_readers import image_files, record_files
from tests.faults.database_readers import video_files
from tests.faults.foreign_readers import CONFIG, model, torch_centre_files
from tests.faults.readers import READERS
from tests.faults.watching import read_watched


def frame(content: bytes, part: int = 0) -> bytes:
    return struct.pack("<II", MAGIC, part << 29 | len(content)) + content + bytes(-len(content) % 4)


def bmp(width: int, height: int) -> bytes:
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + sizes + bytes(64)


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def record_zero(first: float, stop: float) -> bytes:
    """InsightFace's layout with another record 0."""
    return frame(pack([first, stop], b"")) + record_files()[1]["train.rec"][40:]


def tar() -> bytes:
    out = io.BytesIO()
    tarfile.open(fileobj=out, mode="w").close()
    return out.getvalue()


def torch_centres_with_a_list() -> bytes:
    (files,) = torch_centre_files()
    found = torch.load(io.BytesIO(files["checkpoint_gpu_0.pt"]), weights_only=True)
    found["state_optimizer"]["param_groups"][1]["params"] = [[1]]
    return saved(found)


def apex_with(**parts: object) -> bytes:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1).state_dict()
    amp = {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}
    return saved({"model": model().state_dict(), "optimizer": optimizer, "amp": amp, **parts})


UNFOLDED = {**model().state_dict(), "0.weight": torch.zeros(1, dtype=torch.float16).expand(1 << 20, 1 << 20)}
NO_PARAMS = {"state": {}, "param_groups": [{"lr": 0.1}]}
ASSIGNED = b"config = edict()\n"


def lists_of_lists() -> bytes:
    """A thousand bytes, of which 10^12 words would be told."""
    names = ("notes", "suffix_run_name")
    lines = [b"config.notes = ['lol']\n"]
    for number in range(12):
        one, other = names[(number + 1) % 2], names[number % 2]
        lines.append(f"config.{one} = [{', '.join([f'config.{other}'] * 10)}]\n".encode())
    return CONFIG + b"".join(lines) + b"config.lr = config.notes\n"


def progressive(side: int, more_scans: int) -> bytes:
    (content,) = (files["image"] for files in image_files() if b"\xff\xc2" in files["image"][:700])
    at, last = content.index(b"\xff\xc2") + 5, content.rindex(b"\xff\xda")
    content = content[:-2] + more_scans * content[last:-2] + b"\xff\xd9"
    return content[:at] + struct.pack(">HH", side, side) + content[at + 4 :]


def npy(header: str) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode()


def npz() -> bytes:
    (content,) = (files["x.npz"] for files in READERS["npz"].seeds()[:1])
    at = content.index(b"PK\1\2") + 20
    return content[:at] + b"\xff" * 4 + content[at + 4 :]


def video() -> bytes:
    return video_files()[0]["a.mp4"]


def manifest(**facts: object) -> bytes:
    return json.dumps({**json.loads(checkpoint_files()[1]["manifest.json"]), **facts}).encode()


NDARRAY = b"cnumpy\nndarray\n"

FOUND: dict[str, tuple[str, Callable[[], bytes], str]] = {
    # name: (reader, content of its file, what it says now)
    "bin: a size of 4 GB": ("bin", lambda: b"\x8e" + b"\xff" * 4 + bytes(4) + b".", "cut off or damaged"),
    "bin: a frame of 2^63": ("bin", lambda: b"\x95" + b"\xff" * 8 + b"N.", "got a NoneType"),
    # Python's unpickler forgets what is left of a frame: the two bytes behind the size became its highest ones.
    "bin: a size across the end of a frame": (
        "bin",
        lambda: b"\x95\x03" + bytes(7) + b"\x8e\x10" + bytes(7) + b"\xff\x7f" + bytes(14) + b".",
        "got a bytes",
    ),
    "bin: an array of 2 GB": ("bin", lambda: b"cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.", "ndarray with arguments"),
    "bin: bytes(2 GB)": ("bin", lambda: b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.", "bytes with arguments"),
    "bin: an array that nothing fills": (
        "bin", lambda: b"cnumpy._core.multiarray\n_reconstruct\n" + NDARRAY + b"K\x00\x85C\x01b\x87R\x94h\x00\x86.",
        "expected two lists",
    ),
    "bin: an array of 0 x 2^72": (
        "bin",
        lambda: b"cnumpy._core.numeric\n_frombuffer\n(C\x00cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R(K\x00\x8a\x0a"
        + b"\xff" * 9 + b"\x00tX\x01\x00\x00\x00CtR\x94h\x00\x86.",
        r"a\.bin cannot .*shape is not that",
    ),
    # With other values NumPy's own function for this read and wrote where it should not: a segmentation fault.
    "bin: a dtype's state": (
        "bin",
        lambda: b"cnumpy\ndtype\n(X\x02\x00\x00\x00b1I00\nI01\ntR(K\x03NNNNK\x01K\x01K\x00tb.",
        "dtype whose state",
    ),
    # Python's unpickler in C would make room for as many values as the index says.
    "bin: a memo index of 2^32": ("bin", lambda: b"Nr\xff\xff\xff\xff.", "got a NoneType"),
    # The hash of a key nested deeply enough overflows the stack: a segmentation fault.
    "bin: a dict": ("bin", lambda: b"})" + b"\x85" * 200_000 + b"Ns.", "EMPTY_DICT at byte 0"),
    "bin: a dtype of nested tuples": (
        "bin", lambda: b"cnumpy\ndtype\n)" + b"\x85" * 5_000 + b"R.", "arrays of dtype tuple",
    ),
    "bin: a function is changed": ("bin", lambda: b"c_codecs\nencode\n(K\x01tb.", "changes a function"),
    "bin: a megabyte, encoded 10^4 times": (
        "bin",
        lambda: b"X\x00\x00\x10\x00" + bytes(1 << 20) + b"\x94X\x06\x00\x00\x00latin1\x94c_codecs\nencode\n\x940]("
        + b"h\x02h\x00h\x01\x86R" * 10_000 + b"e]\x86.",
        "got 10000 images for 0 pairs",
    ),
    "bin: a list in itself": ("bin", lambda: b"]q\x00(h\x00h\x00e]h\x00a\x86.", r"issame holds \[list\]"),
    "rec: identities from 1e30 on": ("rec", lambda: record_zero(1e30, 6.0), "records start at 1000000015"),
    "rec: identities from nan on": ("rec", lambda: record_zero(float("nan"), 6.0), "key "),
    "rec: an offset that wraps around": (
        "rec-idx", lambda: b"0\t0\n1\t9223372036854775804\n", "key 1 has offset 9223372036854775804",
    ),
    "rec: property of no text": ("rec-property", lambda: b"\xff\xfe2,8,8", "expected `num_classes"),
    "rec: property below 1": ("rec-property", lambda: b"-2,8,8", "expected `num_classes"),
    "list: no UTF-8": ("list", lambda: b"\xff.png 0\n", "not found"),
    "list: a label beyond int64": ("list", lambda: b"a.png 1e30\n", "line 1: expected"),
    "list: a name with 0": ("list", lambda: b"a\x00.png 1\n", "line 1: expected"),
    "pairs: no UTF-8": ("pair-list", lambda: b"\xff.png a 2\n", "line 1: expected"),
    "image: 1.6 gigapixels": ("image", lambda: bmp(40000, 40000), "40000 pixels takes 9,155 MiB to decode"),
    # OpenCV's own decoder ends the process.
    "image: a damaged header of 5.8 gigapixels": (
        "image",
        lambda: image_files()[1]["image"][:20] + b"1e30" + image_files()[1]["image"][24:],
        "PNG of 7 x 828715824 pixels takes 33,193 MiB",
    ),
    "image: another format": ("image", lambda: b"#?RADIANCE\n", "expected JPEG, PNG, BMP, WebP"),
    "idx: none of 2^64 pixels": (
        "idx-images", lambda: struct.pack(">IIII", 0x803, 0, 2**32 - 1, 2**32 - 1), "0 x 4294967295 x 4294967295",
    ),
    "idx: 200 MB in 200 kB": (
        "idx-images",
        lambda: gzip.compress(struct.pack(">IIII", 0x803, 1, 2, 2) + bytes(200 << 20)),
        "at least 5 follow",
    ),
    "config: powers of powers": ("config", lambda: CONFIG + b"config.lr = ((10**64)**64)**64\n", "a number above"),
    "config: 5,000 signs": ("config", lambda: CONFIG + b"config.lr = " + b"-" * 5000 + b"1\n", "too deep"),
    "config: 2,500 brackets": ("config", lambda: b"x = (1.0, 0.9.f = " + b"[" * 2500, "too deep"),
    "config: a coding of no text": ("config", lambda: b"# coding: rot13\n" + CONFIG, "not a text encoding"),
    "config: lists that hold lists": ("config", lists_of_lists, r"config\.lr = \[\[.*expected int or float"),
    "config: 100 kB": ("config", lambda: CONFIG + b"#" * 100_000, "at most 65,536 are read"),
    "image: 60 scans of 64 megapixels": ("image", lambda: progressive(8000, 50), "8000 x 8000 pixels takes 549 MiB"),
    "image: 10,000 scans": ("image", lambda: progressive(9, 10_000), "10010 scans; expected at most 64"),
    "npy: 10^12 rows": (
        "npy",
        lambda: npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 32), }"),
        "128000000000000 bytes; 0 follow",
    ),
    "npz: 4 GB of which 172 bytes count": ("npz", npz, "its parts are larger than the file"),
    "npy: 5,000 brackets": ("npy", lambda: npy("(" * 5000), "a header of 5000 bytes"),
    "hosts: an option of ssh": ("hosts", lambda: b"-oProxyCommand=touch${IFS}pwned\n", "is no host"),
    "hosts: 10^5000 processes": ("hosts", lambda: b"ip1 slots=" + b"9" * 5000, "is no host"),
    "launcher-hosts: no UTF-8": ("launcher-hosts", lambda: b"\xff\n", "is not UTF-8"),
    "losses: no number": ("run-losses", lambda: b"step,loss,lr\n1,x,0.1\n", r"loss\.csv: "),
    "run: its flags are a number": ("run-configuration", lambda: b'{"configuration": 3}', "configuration is int"),
    "manifest: 3,000,000 ranks": ("signed-manifest", lambda: manifest(world_size=3_000_000), "at most 65,536"),
    "manifest: 2^63 ranks": ("manifest", lambda: manifest(format=3, world_size=1 << 63), "at most 65,536"),
    "manifest: 10^15 classes": ("signed-manifest", lambda: manifest(num_classes=10**15), "has num_classes 1000000"),
    "manifest: 4 MB": ("signed-manifest", lambda: manifest(history=["x" * (4 << 20)]), "at most 2,097,152"),
    "video: a codec that nobody knows": ("video", lambda: video().replace(b"avc1", b"zzzz"), "that FFmpeg cannot"),
    "video: a title in Latin-1": ("video", lambda: video().replace(b"Lavf", b"\xa8avf"), "no video that PyAV can"),
    "clips: 10^5000 frames": ("clips", lambda: b"a.mp4 " + b"9" * 5000 + b" 0\n", "line 1: .*two whole numbers"),
    "clips: 10^20 frames": ("clips", lambda: b"a.mp4 100000000000000000000 0\n", "line 1: .*two whole numbers"),
    "ijb: an empty line": ("ijb-points", lambda: b"\n", "line 1: expected an image"),
    "ijb: a score beyond float32": ("ijb-points", lambda: b"1.png" + b" 1" * 10 + b" 1e300\n", "line 1: expected"),
    # Torch searches its own message: 0.9 s for a name of 12 KB, by the square.
    "weights: a name of 64 KiB": ("weights-old", lambda: b"\x80\x02c" + b"[" * 65_536 + b"\nx\n.", "cannot be read as"),
    "apex: a tensor of one number": ("apex", lambda: apex_with(model=UNFOLDED), "repeats few stored numbers"),
    "apex: groups without parameters": ("apex", lambda: apex_with(optimizer=NO_PARAMS), "no torch state dict"),
    "apex: a bytearray": ("apex", lambda: apex_with(more=bytearray(3)), "bytearray"),
    "weights: a tar file": ("weights", tar, "a tar file, as torch wrote before"),
    "torch-centres: a parameter that is a list": (
        "torch-centres", torch_centres_with_a_list, "its optimizer is no torch state dict",
    ),
    "names: no UTF-8": ("class-names", lambda: b"\xff\n", "names"),
    "marker: no UTF-8": ("marker", lambda: b"\xff", "COMPLETE says"),
    "manifest: no head": ("manifest", lambda: b'{"format": 3, "step": 3, "world_size": 1}', "has no class centres"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_it_has_its_words(tmp_path, name):
    reader_name, content, words = FOUND[name]
    reader = READERS[reader_name]
    files = next(files for files in reader.seeds()[:: -1 if reader_name == "rec" else 1] if reader.changed in files)
    if reader_name == "rec":
        files = record_files()[1]
    files = reader.completed({**files, reader.changed: content()})
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)

    def read(folder) -> None:
        with pytest.raises((ValueError, OSError), match=words) as raised:
            reader.read(folder)
        raise raised.value

    size = sum(map(len, files.values()))
    kinds = ("ValueError", "BadRecord", "Damaged", "OSError")
    assert read_watched(read, tmp_path, size, reader.more_bytes).outcome in kinds


@pytest.mark.parametrize(
    ("reader_name", "content"),
    [
        # Lines that are none are left out.
        ("run-history", b'{"step": 1e999}\n{"step": 2, "images_per_s": 3.5}\n'),
        ("run-history", b"[" * 5000 + b"\n"),
        ("ijb-templates", b"1.png 7 70\n2.png 8 71\n" + b"\n" * 50 + b"3.png 9 71\n"),
    ],
)
def test_it_is_read(tmp_path, reader_name, content):
    reader = READERS[reader_name]
    for file, data in {**reader.seeds()[0], reader.changed: content}.items():
        (tmp_path / file).write_bytes(data)
    assert read_watched(reader.read, tmp_path).outcome == "value"


def test_a_label_that_its_record_does_not_hold(tmp_path):
    """A record of 8 bytes: its label was taken from the record behind it."""
    path = tmp_path / "train.rec"
    path.write_bytes(frame(struct.pack("<If", 0, 3.0)) + frame(pack(5.0, b"image")))
    path.with_suffix(".idx").write_text("0\t0\n1\t16\n")
    with RecordReader(path) as reader:
        assert reader.first_labels(np.array([1])).tolist() == [5.0]
        with pytest.raises(BadRecord, match=r"train\.rec, key 0: label header cut off: got 8 bytes"):
            reader.first_labels(np.array([0, 1]))


def test_weights_whose_layers_have_damaged_versions(tmp_path):
    """They are read without."""
    state = model().state_dict()
    state._metadata = {"": {"version": 1}, "0": ("version", 2), "1": {"version": (2,)}}
    (tmp_path / "model.pt").write_bytes(saved(state))
    reader = READERS["weights"]
    assert read_watched(reader.read, tmp_path, more_bytes=reader.more_bytes).outcome == "value"


def test_a_label_that_is_a_signalling_nan(tmp_path):
    """NumPy warned."""
    path = tmp_path / "train.rec"
    path.write_bytes(frame(struct.pack("<II16x", 0, 0x7FA00000) + b"image"))
    path.with_suffix(".idx").write_text("0\t0\n")
    (tmp_path / "property").write_text("2,8,8")
    with warnings.catch_warnings(), closing(RecordSource(tmp_path)) as source:
        warnings.simplefilter("error")
        with pytest.raises(BadRecord, match=r"train\.rec, key 0: label nan"):
            source.labels()


def test_a_label_behind_a_magic_number(tmp_path):
    """The header's id is the magic number, so the record is split within its header, before its one label."""
    head, tail = struct.pack("<If", 1, 0.0), struct.pack("<If", 0, 7.0)
    path = tmp_path / "train.rec"
    path.write_bytes(frame(head, 1) + frame(tail, 3))
    path.with_suffix(".idx").write_text("0\t0\n")
    with RecordReader(path) as reader, pytest.raises(BadRecord, match="label header cut off"):
        reader.first_labels(np.array([0]))
    path.write_bytes(frame(head, 1) + frame(bytes(12) + struct.pack("<f", 7.0), 3))
    with RecordReader(path) as reader:
        assert reader.first_labels(np.array([0])).tolist() == [7.0]


@pytest.mark.parametrize("parts", [(2,), (3,), (0, 3), (1, 1, 3), (1, 0), (5,)])
def test_parts_that_do_not_follow_each_other_get_no_index(tmp_path, parts):
    path = tmp_path / "train.rec"
    path.write_bytes(b"".join(frame(bytes(32), part) for part in parts))
    with pytest.raises(BadRecord, match="no whole frame here"):
        write_index(path)
    assert not path.with_suffix(".idx").exists()


def test_an_image_of_one_line_is_not_enlarged(tmp_path):
    """Its short side made 112 pixels, the long one would be 112 times as long: gigabytes."""
    with pytest.raises(BadRecord, match="image of 100000 x 1 pixels"):
        fit(np.zeros((1, 100_000, 3), np.uint8), 112)
