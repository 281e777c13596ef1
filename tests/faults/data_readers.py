"""Training and verification sets: RecordIO, MNIST's idx, .bin, lists, images."""

import gzip
import os
import pickle
import zlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np

from partial_fc.data.decode import cv2, decode
from partial_fc.data.idx import read_idx, read_set, write_idx
from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.pairs import read_pairs, write_pairs
from partial_fc.data.record_files import _COPY_HEAD
from partial_fc.data.recordio import MAGIC, RecordSource, RecordWriter, pack, write_index
from partial_fc.data.sample import BadRecord, Source
from partial_fc.files import read_bytes
from partial_fc.verbs.data.draw_pairs import _read_pair_list
from tests.faults.mutations import PICKLE_WORDS, in_gzip, in_pickle, in_png, in_scans
from tests.faults.reader import Files, Reader, written

# ---- RecordIO ----


@cache
def record_files() -> list[Files]:
    """im2rec's layout; InsightFace's, with identity records and a property file; records split at a magic number."""
    magic = MAGIC.to_bytes(4, "little")
    plain = [(key, pack(float(key % 3), _png(key), key)) for key in range(6)]
    identity = [(0, pack([4.0, 6.0], b"")), *((key, pack([float(key // 2), 1.0], _png(key), key)) for key in (1, 2, 3))]
    identity += [(4, pack([1.0, 2.0], b"")), (5, pack([2.0, 4.0], b""))]
    split = [
        (7, pack(1.0, b"abcd" + magic + magic + b"xy", 7)),
        (9, pack(0.0, magic, 9)),
        (12, pack([1.0, 2.0], _png(1))),
    ]
    return [_records(plain), {**_records(identity), "property": b"2,8,8\n"}, _records(split)]


def _records(records: list[tuple[int, bytes]]) -> Files:
    def write(folder: Path) -> None:
        with RecordWriter(folder / "train.rec") as writer:
            for key, record in records:
                writer.write(key, record)

    return written(write)


def read_records(folder: Path) -> None:
    try:
        source = RecordSource(folder)
    except FileNotFoundError:
        return
    try:
        _read_all(source)
    finally:
        source.close()


def _read_all(source: Source) -> None:
    """Labels in one go, hints and samples: what one way says of a sample is what the other says."""
    try:
        label_N = source.labels()
    except BadRecord:
        label_N = None
    indices = range(min(len(source), 50))
    source.will_need(indices)
    errors = []
    for index in indices:
        try:
            label = source.read(index).label
            assert -(2**63) <= label < 2**63, f"label {label}"
            assert label_N is None or label == label_N[index], f"labels() says {label_N[index]}, read() {label}"
        except BadRecord as error:
            errors.append(error)
    for error in errors:
        raise error


_TIME_NS = 10**18


def cached_files() -> list[Files]:
    """With the binary copy of the index."""

    def write(files: Files) -> Files:
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            read_cached(Path(folder))
            return files | {"train.idx.cache": (Path(folder) / "train.idx.cache").read_bytes()}

    return [write(files) for files in record_files()]


def read_cached(folder: Path) -> None:
    os.utime(folder / "train.idx", ns=(_TIME_NS, _TIME_NS))
    with mock.patch("partial_fc.data.record_files._CACHED_FROM_BYTES", 1):
        read_records(folder)


def signed_cache(files: Files) -> Files:
    """With the head that its contents need to be believed."""
    content = files["train.idx.cache"]
    body = content[_COPY_HEAD.size :]
    num_records = int.from_bytes(content[24:32], "little")  # as it is, or was changed to
    head = _COPY_HEAD.pack(b"PFCIDX01", len(files["train.idx"]), _TIME_NS, num_records, zlib.crc32(body), len(body))
    return files | {"train.idx.cache": head + body}


def unindexed_files() -> list[Files]:
    return [{name: content for name, content in files.items() if name != "train.idx"} for files in record_files()]


def read_without_index(folder: Path) -> None:
    (folder / "train.idx").unlink(missing_ok=True)
    write_index(folder / "train.rec")
    read_records(folder)


# ---- MNIST, verification pairs, lists, images ----


@cache
def mnist_files() -> list[Files]:
    image_NHW = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)

    def write(folder: Path) -> None:
        write_idx(folder / "t10k-images-idx3-ubyte", image_NHW)
        write_idx(folder / "t10k-labels-idx1-ubyte", np.array([3, 9], np.uint8))

    plain = written(write)
    return [plain, {name: gzip.compress(content, mtime=0) for name, content in plain.items()}]


@cache
def pair_files() -> list[Files]:
    """As other programs write them: every pickle protocol; bytes, arrays, arrays of objects and NumPy's booleans."""
    images, array = (
        [b"\xff\xd8 one", b"two\x00"],
        [np.frombuffer(b"\xff\xd8 one", np.uint8), np.arange(5, dtype=np.uint8)],
    )
    contents = [pickle.dumps((images, [True]), protocol) for protocol in range(6)]
    contents += [pickle.dumps((array, np.array([True])), protocol) for protocol in (0, 2, 5)]
    contents += [pickle.dumps((np.array(images, object), [True]), protocol) for protocol in (0, 2, 5)]
    contents.append(pickle.dumps((images, [np.bool_(False)]), 2))
    contents.append(written(lambda folder: write_pairs(folder / "a.bin", images, [False]))["a.bin"])
    return [{"a.bin": content} for content in contents]


def read_list(folder: Path) -> None:
    for path in sorted(folder.glob("list*")):
        source = ImageFolder(list_file=path)
        try:
            _read_all(source)
        except BadRecord as error:  # it names the image, which can be anywhere
            raise BadRecord(f"{path}: {error}") from error


@cache
def image_files() -> list[Files]:
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), np.uint8)
    suffixes = (".jpg", ".png", ".bmp", ".webp")
    files = [cv2.imencode(suffix, pixels)[1].tobytes() for suffix in suffixes]
    files.append(cv2.imencode(".png", pixels[:, :, 0])[1].tobytes())
    files += [cv2.imencode(suffix, pixels)[1].tobytes() for suffix in (".gif", ".tiff")]
    files.append(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes())
    files.append(cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes())
    return [{"image": content} for content in files]


def read_image(folder: Path) -> None:
    try:
        image = decode(read_bytes(folder / "image", 1 << 30))
    except BadRecord as error:
        raise BadRecord(f"{folder}: {error}") from error  # as every source does
    assert (image.dtype, image.ndim, image.shape[2]) == (np.uint8, 3, 3)


def _png(key: int) -> bytes:
    return cv2.imencode(".png", np.full((4, 4, 3), key, np.uint8))[1].tobytes()


_MAGIC = MAGIC.to_bytes(4, "little")
_FRAMES = tuple(_MAGIC + (part << 29 | length).to_bytes(4, "little") for part in range(5) for length in (0, 8, 28))
_LISTED = (b"nan", b"1e30", b"-0.0", b"1e18", b"99999999999999999999", b"\x00", b" 1", b"\t2\t", b"x" * 300)
_IMAGES, _LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_NAMED = {"a.png": b"1", "b c.png": b"2"}
_LIST = {"list": b"a.png 0\nb c.png 1\n\na.png\t2\n", **_NAMED}
_LST = {"list.lst": b"0\t0\ta.png\n1\t1.0\t0.5\tb c.png\n", **_NAMED}
_SEGMENTS = (
    b"\xff\xc2",
    b"\xff\xc0",
    b"\xff\xda",
    b"\xff\xd9",
    b"\xff\xfe\x00\x04ab",
    b"\xff\xff",
    *(size.to_bytes(2, "big") for size in (2000, 4000, 65500)),
)
_PAIRS = {"pairs.txt": b"a.png b.png 1\nc\td e\t0\n"}


def read_mnist(folder: Path) -> None:
    read_set(folder, "t10k")


def read_labels(folder: Path) -> None:
    read_idx(folder / _LABELS, "labels")


def read_bin(folder: Path) -> None:
    read_pairs(folder / "a.bin")


def read_pair_list(folder: Path) -> None:
    _read_pair_list(folder / "pairs.txt")


READERS = (
    Reader("rec", "train.rec", record_files, read_records, (_MAGIC, *_FRAMES)),
    Reader("rec-idx", "train.idx", record_files, read_records, (b"\t", b"0\t", b"1 2 3\n", *_LISTED)),
    Reader("rec-cache", "train.idx.cache", cached_files, read_cached, may_fail=False, completed=signed_cache),
    Reader("rec-property", "property", lambda: record_files()[1:2], read_records, _LISTED),
    Reader("rec-unindexed", "train.rec", unindexed_files, read_without_index, (_MAGIC, *_FRAMES)),
    Reader("idx-images", _IMAGES, mnist_files, read_mnist, inside=(in_gzip,)),
    Reader("idx-labels", _LABELS, mnist_files, read_labels, inside=(in_gzip,)),
    Reader("bin", "a.bin", pair_files, read_bin, tuple(PICKLE_WORDS), (in_pickle,)),
    Reader("list", "list", lambda: [_LIST], read_list, _LISTED),
    Reader("lst", "list.lst", lambda: [_LST], read_list, _LISTED),
    Reader("pair-list", "pairs.txt", lambda: [_PAIRS], read_pair_list, _LISTED),
    Reader("image", "image", image_files, read_image, _SEGMENTS, inside=(in_png, in_scans)),
)
