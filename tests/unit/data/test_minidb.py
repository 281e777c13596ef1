"""Caffe2's minidb files, against bytes written out by hand."""

from pathlib import Path

import pytest

from partial_fc.data.databases import minidb

# What MiniDB of caffe2/core/db.cc writes on x86: two int32, key, value.
BYTES = b"\x03\x00\x00\x00\x02\x00\x00\x00abcXY" + b"\x01\x00\x00\x00\x00\x00\x00\x00k"
ITEMS = [(b"abc", b"XY"), (b"k", b"")]


def test_bytes_as_caffe2_has_them(tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    minidb.write(path, iter(ITEMS))
    assert path.read_bytes() == BYTES
    assert list(minidb.read(path)) == ITEMS
    assert minidb.MinidbStore(path)._edges.tolist() == [0, 13, 22]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mdl"
    path.write_bytes(BYTES)
    with pytest.raises(ValueError, match="keys of at least 1"):
        minidb.write(path, [(b"", b"x")])
    assert path.read_bytes() == BYTES
    assert list(tmp_path.iterdir()) == [path]
