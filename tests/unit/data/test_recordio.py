"""RecordIO against mxnet's own reader and writer, and what a damaged file says."""

import struct
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import record_files, recordio
from partial_fc.data.recordio import RecordReader, RecordWriter, pack, unpack, write_index
from partial_fc.data.sample import BadRecord
from tests.recipes.mxnet.mxnet_recordio import mxnet_pack

MAGIC = struct.pack("<I", recordio.MAGIC)
# Lengths of every remainder modulo 4; the magic number aligned, unaligned, first, last, in a row, in a tail.
PAYLOADS = [
    b"",
    b"a",
    b"abc",
    b"abcd" * 1000 + b"x",
    MAGIC,
    MAGIC + b"ab",
    b"four" + MAGIC,
    b"four" + MAGIC + MAGIC + b"end",
    b"odd" + MAGIC + b"aligned?",
    b"four" + MAGIC + b"1234" + MAGIC + b"12345" + MAGIC,
    b"four" + MAGIC[:3],
    MAGIC * 5,
]


def write(path: Path, payloads: list[bytes]) -> Path:
    with RecordWriter(path) as writer:
        for key, payload in enumerate(payloads):
            writer.write(key, payload)
    return path


def mxnet_write(path: Path, payloads: list[bytes]) -> Path:
    mx = pytest.importorskip("recipes.mxnet.library").mx
    writer = mx.recordio.MXIndexedRecordIO(str(path.with_suffix(".idx")), str(path), "w")
    for key, payload in enumerate(payloads):
        writer.write_idx(key, payload)
    writer.close()
    return path


@pytest.mark.mxnet
def test_bytes_equal_mxnets_and_each_reads_them(mx, tmp_path: Path) -> None:
    theirs = mxnet_write(tmp_path / "theirs.rec", PAYLOADS)
    ours = write(tmp_path / "ours.rec", PAYLOADS)
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.with_suffix(".idx").read_bytes() == theirs.with_suffix(".idx").read_bytes()
    mxnet_reader = mx.recordio.MXIndexedRecordIO(str(theirs.with_suffix(".idx")), str(theirs), "r")
    for key, payload in enumerate(PAYLOADS):
        assert (
            RecordReader(ours).read(key) == (mxnet_reader.read_idx(key) or b"") == payload
        )  # mxnet gives None for b""


@pytest.mark.mxnet
@pytest.mark.parametrize("label", [3, 7.5, [2.0], [5.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
def test_label_header_equals_mxnets(mx, label: float | list[float]) -> None:
    theirs = mxnet_pack(label, b"image", 11, 12)
    assert pack(label, b"image", 11, 12) == theirs
    header, content = unpack(theirs)
    expected, _ = mx.recordio.unpack(theirs)
    assert (header.flag, header.id, header.id2, content) == (expected.flag, 11, 12, b"image")
    np.testing.assert_array_equal(header.label, np.atleast_1d(np.float32(label)))


def test_keys_in_any_order_and_with_holes(tmp_path: Path) -> None:
    keys = [7, 3, 100, 50_000_000_000, 4]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for key in keys:
            writer.write(key, pack(key % 97, f"record {key}".encode()))
    reader = RecordReader(tmp_path / "a.rec")
    assert list(reader.keys) == sorted(keys)
    assert all(reader.read_sample(key)[1] == f"record {key}".encode() for key in keys)
    order = np.array([100, 3, 7])
    np.testing.assert_array_equal(reader.first_labels(order)[1][:, 0], np.float32(order % 97))
    with pytest.raises(KeyError, match="no record has key 5"):
        reader.read(5)


def test_labels_by_record_and_all_at_once(tmp_path: Path) -> None:
    whole = [pack(0, b"image"), pack([3.0, 9.0], b""), pack([4.0], b"y" * 9), pack(5.5, b"four" + MAGIC + b"tail")]
    cut = [pack(1, b"")[:-1], pack([1.0, 2.0, 3.0], b"")[:-1]]
    reader = RecordReader(write(tmp_path / "a.rec", whole + cut))
    assert reader.first_labels(np.arange(4))[1][:, 0].tolist() == [0, 3, 4, 5.5]
    for key, size in ((4, 23), (5, 35)):
        for read in (reader.read_sample, lambda key: reader.first_labels(np.array([key]), 3)):
            with pytest.raises(BadRecord, match=f"a.rec, key {key}: label header cut off: got {size} bytes"):
                read(key)


def test_index_over_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "_CHUNK_BYTES", 50)
    keys = np.random.default_rng(0).permutation(1000)
    (tmp_path / "a.idx").write_text("".join(f"{key}\t{key * 2**33}\n" for key in keys).rstrip("\n"))
    got_keys, got_offsets = record_files.read_index(tmp_path / "a.idx")
    np.testing.assert_array_equal(got_keys, np.arange(1000))
    np.testing.assert_array_equal(got_offsets, np.arange(1000) * 2**33)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\t0\n1\n", r"expected `key<TAB>offset`.*b'1'"),
        ("0\t0\nx\t8\n", r"got b'x\\t8'"),
        ("0\t0\n1.5\t8\n", r"got b'1.5\\t8'"),
        ("", "has no lines"),
        ("0\t0\n0\t8\n", "key 0 occurs more than once"),
    ],
)
def test_wrong_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.idx").write_text(text)
    with pytest.raises(ValueError, match=message):
        record_files.read_index(tmp_path / "a.idx")


def test_missing_or_foreign_index(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"x" * 100] * 3)
    path.with_suffix(".idx").write_text("0\t0\n1\t108\n2\t4096\n")
    with pytest.raises(ValueError, match=r"a\.idx: key 2 has offset 4096; expected a multiple of 4 below 324"):
        RecordReader(path)
    path.with_suffix(".idx").unlink()
    with pytest.raises(ValueError, match="partial-fc data index"):
        RecordReader(path)


def test_damage_names_file_key_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"x" * 100, b"four" + MAGIC + b"tail", b"y" * 100])
    whole = path.read_bytes()

    def error(content: bytes, key: int) -> str:
        path.write_bytes(content)
        with pytest.raises(BadRecord) as caught:
            RecordReader(path).read(key)
        return str(caught.value)

    assert "a.rec, key 0, offset 0: got 0x00000000, expected the magic" in error(bytes(4) + whole[4:], 0)
    assert "key 2, offset 132: record of 100 bytes ends at 240, expected at most 239" in error(whole[:-1], 2)
    middle = whole.index(MAGIC, 112)
    assert "expected part 2 or 3" in error(whole[:middle] + whole[:8] + whole[middle + 8 :], 1)
    assert "got part 3 of a split record" in error(whole[:112] + struct.pack("<I", 3 << 29) + whole[116:], 1)


def test_index_made_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", PAYLOADS)
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").unlink()
    assert recordio.write_index(path) == len(PAYLOADS)
    assert path.with_suffix(".idx").read_bytes() == index
    for cut in (4, 8):  # inside the last frame, and before it: the last record is split
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(BadRecord, match=f"after {len(PAYLOADS) - 1} records: "):
            recordio.write_index(path)


# ---- files that once gave a wrong label


def frame(content: bytes, part: int = 0) -> bytes:
    return struct.pack("<II", recordio.MAGIC, part << 29 | len(content)) + content + bytes(-len(content) % 4)


@pytest.mark.parametrize("parts", [(2,), (3,), (0, 3), (1, 1, 3), (1, 0), (5,)])
def test_parts_that_do_not_follow_each_other_get_no_index(tmp_path, parts):
    path = tmp_path / "train.rec"
    path.write_bytes(b"".join(frame(bytes(32), part) for part in parts))
    with pytest.raises(BadRecord, match="split record"):
        write_index(path)
    assert not path.with_suffix(".idx").exists()
