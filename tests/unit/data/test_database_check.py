"""The data check at start, over a database whose labels nobody reads in advance."""

from pathlib import Path

import numpy as np
import pytest

from partial_fc import comm
from partial_fc.data.check.at_start import Mode, check_data
from partial_fc.data.databases import open_database
from tests.unit import databases
from tests.unit.databases import records, write_lmdb


def check(path: Path, num_classes: int = 10, mode: Mode = "quick") -> list[str]:
    world = comm.init()
    try:
        return check_data(open_database(path, None, num_classes), num_classes, mode, world, max_bad_records=2)
    finally:
        world.close()


@pytest.mark.parametrize(("mode", "labels"), [("quick", "their labels"), ("full", "all labels")])
def test_good(tmp_path: Path, mode: Mode, labels: str) -> None:
    grey = {b"z%d" % i: databases.datum(databases.picture(i)[..., :1], i) for i in range(10)}
    lines = check(write_lmdb(tmp_path / "db", {**records(40), **grey}), mode=mode)
    assert f"50 of 50 images and {labels}" in lines[0]
    assert "nothing wrong" in lines[0]


def test_bad(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", records(40))
    message = r"labels outside 0 to 4 (?s:.*)is the number of classes(?s:.*)key 00000005_5.png"
    with pytest.raises(ValueError, match=message):
        check(path, num_classes=5)
    black = {b"%04d" % i: databases.datum(np.zeros((4, 4, 3), np.uint8), i % 10) for i in range(40)}
    with pytest.raises(ValueError, match="40 of 40 images are of a single colour"):
        check(write_lmdb(tmp_path / "black", black))
    broken = {b"%04d" % i: b"\x08" for i in range(40)}
    with pytest.raises(ValueError, match=r"40 of 40 images cannot be used(?s:.*)broken, key 0000: 1 bytes that begin"):
        check(write_lmdb(tmp_path / "broken", broken))
