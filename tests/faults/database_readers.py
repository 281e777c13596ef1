"""Image databases and models of Caffe and Caffe2; videos and their lists."""

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from partial_fc.data.databases import minidb
from partial_fc.data.databases.leveldb_manifest import read_manifest
from partial_fc.data.databases.minidb import MinidbStore
from partial_fc.data.databases.records import BYTE, INT32, STRING, Datum, TensorProtos
from partial_fc.data.databases.source import DatabaseSource
from partial_fc.data.decode import cv2, decode
from partial_fc.data.sample import BadRecord
from partial_fc.data.video.clip_list import ClipList
from partial_fc.data.video.frames import VideoFile
from partial_fc.foreign import caffe2_model
from tests.faults.reader import Files, Reader, written
from tests.unit import videos


def _records() -> list[bytes]:
    png = cv2.imencode(".png", np.full((4, 5, 3), 7, np.uint8))[1].tobytes()
    both = TensorProtos()
    both.protos.add(data_type=STRING, string_data=[png])
    both.protos.add(data_type=INT32, int32_data=[2])
    boxed = TensorProtos()
    boxed.protos.add(data_type=BYTE, dims=[4, 5, 3], byte_data=bytes(60))
    boxed.protos.add(data_type=INT32, int32_data=[1])
    boxed.protos.add(data_type=INT32, int32_data=[1, 1, 2, 2])
    plain = Datum(channels=3, height=4, width=5, data=bytes(60), label=1)
    return [m.SerializeToString() for m in (Datum(data=png, label=0, encoded=True), plain, both, boxed)]


@cache
def minidb_files() -> list[Files]:
    items = [(b"%04d" % i, record) for i, record in enumerate(_records())]
    return [written(lambda folder: minidb.write(folder / "a.minidb", items))]


def read_minidb(folder: Path) -> None:
    source = DatabaseSource(MinidbStore(folder / "a.minidb"), 10)
    try:
        for index in range(min(len(source), 50)):
            image = source.read(index).image
            if isinstance(image, bytes):
                try:
                    decode(image)
                except BadRecord as error:
                    raise BadRecord(f"{source.where(index)}: {error}") from error
    finally:
        source.close()


@cache
def _network() -> dict[str, torch.Tensor]:
    """Of Caffe2's blobs it needs those of a single block."""
    torch.manual_seed(0)
    names = ("conv1.weight", *(f"layer1.0.conv{i}.weight" for i in (1, 2, 3)), "fc.weight", "fc.bias")
    state = {name: torch.ones(3, 2) for name in names}
    for norm in ("bn1", *(f"layer1.0.bn{i}" for i in (1, 2, 3))):
        state |= {f"{norm}.{part}": torch.ones(2) for part in ("weight", "bias", "running_mean", "running_var")}
    return state


@cache
def caffe2_files() -> list[Files]:
    state = _network()
    momentum = {f"{name}/momentum": torch.ones_like(t) for name, t in state.items() if "running" not in name}
    return [written(lambda folder: caffe2_model.write(folder / "a.mdl", state, momentum, 5))]


def read_caffe2(folder: Path) -> None:
    caffe2_model.read(folder / "a.mdl", _network())


@cache
def leveldb_files() -> list[Files]:
    """A MANIFEST as LevelDB writes it: comparator, log, next file, last sequence; then a table."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    def text(value: bytes) -> bytes:
        return number(len(value)) + value

    first = (
        b"\x01" + text(b"leveldb.BytewiseComparator") + b"\x02" + number(4) + b"\x03" + number(6) + b"\x04" + number(9)
    )
    key = b"\x01" + bytes(7)
    table = b"\x07" + number(0) + number(5) + number(3) + text(b"aa" + key) + text(b"zz" + key)
    manifest = b"".join(bytes(4) + len(edit).to_bytes(2, "little") + b"\x01" + edit for edit in (first, table))
    return [{"CURRENT": b"MANIFEST-000004\n", "MANIFEST-000004": manifest, "000005.ldb": b"abc", "000004.log": b"x"}]


def read_leveldb(folder: Path) -> None:
    found = read_manifest(folder)
    assert found.num_bytes >= 0
    assert found.overlapping_bytes >= 0


# ---- videos


@cache
def video_files() -> list[Files]:
    kinds: list[tuple[str, dict[str, str]]] = [("libx264", {}), ("libx264", videos.LONG_GOP), ("mpeg4", {})]
    return [written(partial(_write_video, codec, options)) for codec, options in kinds]


def _write_video(codec: str, options: dict[str, str], folder: Path) -> None:
    videos.write(folder / "a.mp4", 12, options, codec=codec)


def read_video(folder: Path) -> None:
    path = folder / "a.mp4"
    try:
        for _ in VideoFile(path).read(lambda count: [0, count // 2, count - 1]):
            pass
    except BadRecord as error:  # as every source does
        raise BadRecord(f"{path}: {error}") from error


_CLIPS = {"clips.txt": b"a.mp4 12 0\nb/c 3 1\n"}


def read_clips(folder: Path) -> None:
    clips = ClipList(folder / "clips.txt", folder, 5, videos=True)
    clips.missing(range(len(clips)))
    clips.labels()


_LENGTHS = tuple(value.to_bytes(4, "little") for value in (0, 1, 4, 2**31 - 1))
_PROTO = (b"\x0a\x00", b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80", b"\x12", b"\x22", b"\x52\x02\xff\x7f")
_BOXES = (b"moov", b"mdat", b"stsz", b"stts", b"stsc", b"stco", b"co64", b"ctts", b"elst", b"hvcC", b"avcC", b"stss")

READERS = (
    Reader("minidb", "a.minidb", minidb_files, read_minidb, (*_LENGTHS, *_PROTO)),
    Reader("caffe2-model", "a.mdl", caffe2_files, read_caffe2, (*_LENGTHS, *_PROTO)),
    Reader("leveldb-manifest", "MANIFEST-000004", leveldb_files, read_leveldb, (*_PROTO, b"\x07", b"\x06", b"\x09")),
    Reader("leveldb-current", "CURRENT", leveldb_files, read_leveldb, (b"MANIFEST-", b"../", b"/dev/zero")),
    # FFmpeg believes the sizes that a file announces; what it is fed with, and how much of it, is ours.
    Reader("video", "a.mp4", video_files, read_video, (*_BOXES, *_LENGTHS), more_bytes=None),
    Reader("clips", "clips.txt", lambda: [_CLIPS], read_clips, (b"\t", b" 9" + b"9" * 5000, b"\x00", b"-1", b"1e9")),
)
