"""Packing folders into .rec, read back by us and by mxnet."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data import ImageFolder, RecordSource, open_source
from partial_fc.data.decode import decode
from partial_fc.data.recordio import RecordReader, unpack
from partial_fc.verbs.data.pack import PackOptions, pack_images

COUNTS = [2, 0, 3, 1]


def make_images(root: Path, counts: list[int]) -> None:
    """ROOT/classC/N.png, 12 x 12: each image one grey value of its own. A class of 0 images is a folder too."""
    for label in range(len(counts)):
        (root / f"class{label}").mkdir(parents=True)
    for value, (label, number) in enumerate((c, n) for c, count in enumerate(counts) for n in range(count)):
        cv2.imwrite(str(root / f"class{label}/{number}.png"), np.full((12, 12, 3), 7 * value, np.uint8))


def test_insightface_layout(tmp_path: Path) -> None:
    make_images(tmp_path / "in", COUNTS)
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out", image_size=12))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "classes.txt", "property", "train.idx", "train.lst", "train.rec",
    ]  # fmt: skip
    assert (tmp_path / "out/property").read_text() == "4,12,12\n"
    assert (tmp_path / "out/classes.txt").read_text().split() == [f"class{i}" for i in range(4)]
    assert (tmp_path / "out/train.lst").read_text().splitlines()[2] == "1\tclass2/0.png\t2"
    reader = RecordReader(tmp_path / "out/train.rec")
    assert unpack(reader.read(0))[0].label.tolist() == [7, 11]
    assert [unpack(reader.read(key))[0].label.tolist() for key in range(7, 11)] == [[1, 3], [3, 3], [3, 6], [6, 7]]
    packed, files = RecordSource(tmp_path / "out"), ImageFolder(tmp_path / "in")
    assert packed.num_classes == 4
    # Images of the right size are copied byte for byte.
    assert [packed.read(i)[:2] for i in range(6)] == [files.read(i)[:2] for i in range(6)]


@pytest.mark.mxnet
def test_mxnet_iterates_over_what_we_pack(mx, tmp_path: Path) -> None:
    """The way InsightFace's FaceImageIter walks a set: record 0, identity records, images."""
    make_images(tmp_path / "in", COUNTS)
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out", image_size=8))
    record = mx.recordio.MXIndexedRecordIO(str(tmp_path / "out/train.idx"), str(tmp_path / "out/train.rec"), "r")
    header, _ = mx.recordio.unpack(record.read_idx(0))
    assert header.flag > 0
    seen = []
    for identity in range(int(header.label[0]), int(header.label[1])):
        ends, content = mx.recordio.unpack(record.read_idx(identity))
        assert content == b""
        for key in range(int(ends.label[0]), int(ends.label[1])):
            image_header, image = mx.recordio.unpack(record.read_idx(key))
            assert mx.image.imdecode(image).shape == (8, 8, 3)
            seen.append(int(image_header.label[0]))
    assert seen == [0, 0, 2, 2, 2, 3]


@pytest.mark.mxnet
def test_plain_layout_feeds_mxnets_image_iterator(mx, tmp_path: Path) -> None:
    make_images(tmp_path / "in", COUNTS)
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out", image_size=8, plain=True))
    batch = mx.io.ImageRecordIter(
        path_imgrec=str(tmp_path / "out/train.rec"), data_shape=(3, 8, 8), batch_size=6, preprocess_threads=1
    ).next()
    assert batch.label[0].asnumpy().tolist() == [0, 0, 2, 2, 2, 3]
    source = RecordSource(tmp_path / "out")
    assert source.labels().tolist() == [0, 0, 2, 2, 2, 3]
    for i in range(6):
        image = source.read(i).image
        assert isinstance(image, bytes)
        np.testing.assert_array_equal(decode(image).transpose(2, 0, 1), batch.data[0][i].asnumpy())
    assert (tmp_path / "out/train.lst").read_text().splitlines()[2] == "2\t2.000000\tclass2/0.png"


def test_repacking_a_rec_at_another_size(tmp_path: Path) -> None:
    make_images(tmp_path / "in", COUNTS)
    pack_images(PackOptions(tmp_path / "in", tmp_path / "one", image_size=None, plain=True))
    assert (tmp_path / "one/property").read_text() == "4,0,0\n"
    pack_images(PackOptions(tmp_path / "one", tmp_path / "two", image_size=5))
    source = open_source(tmp_path / "two")
    image = source.read(5).image
    assert isinstance(image, bytes)
    assert decode(image).shape == (5, 5, 3)
    assert abs(int(decode(image)[2, 2, 0]) - 5 * 7) <= 1
    assert source.labels().tolist() == [0, 0, 2, 2, 2, 3]


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    make_images(tmp_path / "in", [1, 1])
    (tmp_path / "in/class0").rename(tmp_path / "in" / os.fsdecode(b"Bj\xf6rn"))
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out"))
    assert (tmp_path / "out/classes.txt").read_bytes() == b"Bj\xf6rn\nclass1\n"
    assert (tmp_path / "out/train.lst").read_bytes().startswith(b"1\tBj\xf6rn/0.png\t0\n")
    assert RecordSource(tmp_path / "out").class_names() == ImageFolder(tmp_path / "in").class_names()


def test_bad_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_images(tmp_path / "in", COUNTS)
    (tmp_path / "in/class2/1.png").write_bytes(b"rubbish")
    for name in ("a.heic", "b.HEIC"):
        (tmp_path / "in/class0" / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"class2/1.png: no image.*--max-bad-records"):
        pack_images(PackOptions(tmp_path / "in", tmp_path / "out"))
    assert not (tmp_path / "out/train.rec").exists()
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out", max_bad_records=1))
    assert "left out: " in caplog.text
    assert "2 .heic" in caplog.text
    assert "1 class with no image, the first: class1\n" in caplog.text
    assert RecordSource(tmp_path / "out").labels().tolist() == [0, 0, 2, 2, 3]
    with pytest.raises(ValueError, match="exists; remove it"):
        pack_images(PackOptions(tmp_path / "in", tmp_path / "out"))
