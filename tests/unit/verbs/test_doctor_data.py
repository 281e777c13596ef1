"""`partial-fc doctor data` on folders, lists, and .bin pairs."""

from pathlib import Path

import cv2
import numpy as np

from partial_fc.data.pairs import write_pairs
from partial_fc.verbs.data.pack import PackOptions, pack_images
from partial_fc.verbs.doctor.data import DataOptions, doctor_data
from tests.unit.doctor_sets import class_folders, examine, picture, records, write


def test_what_pack_writes_is_good(tmp_path):
    class_folders(tmp_path / "in", [0, 0, 1, 1, 2, 2])
    for plain in (False, True):
        pack_images(PackOptions(tmp_path / "in", tmp_path / f"out{plain}", image_size=24, plain=plain))
        assert examine(tmp_path / f"out{plain}") == (0, {})
    assert examine(tmp_path / "in") == (0, {})


def test_class_folders(tmp_path, capsys):
    class_folders(tmp_path / "in", [0, 0, 0, 2, 2, 2, 3])
    (tmp_path / "in/class1").mkdir()
    (tmp_path / "in/class2/4.jpg").write_bytes(picture(0))  # = class0/0.jpg
    (tmp_path / "in/class0/2.jpg").write_bytes(picture(0))
    (tmp_path / "in/class2/5.jpg").write_bytes(b"")
    capsys.readouterr()
    status, found = examine(tmp_path / "in")
    assert status == 1
    assert set(found) == {
        "class-empty", "class-one-image", "image-undecodable", "repeated-same-class", "repeated-other-class",
    }  # fmt: skip
    later = {"file": f"{tmp_path}/in/class2/4.jpg", "class": 2}
    first = {"same as file": f"{tmp_path}/in/class0/0.jpg", "same as class": 0}
    assert found["repeated-other-class"]["places"] == [later | first]
    printed = capsys.readouterr().out
    assert f"    {tmp_path}/in/class2/5.jpg, class 2, problem no image that OpenCV can read" in printed


def test_what_is_not_read_of_a_folder_is_counted_and_named(tmp_path):
    names = ["a/0.JPG", "a/1.HEIC", "a/2.heic", "B/3.Jpeg", "B/4.mov", "B/.DS_Store", "B/._3.Jpeg", "B/in/5.jpg"]
    for name in [*names, "6.jpg", "b_/7.png", "b /8.png"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(picture(len(name)))
    _, found = examine(tmp_path)
    left_out = found["files-left-out"]
    too_deep = "1 too deep (a folder within a class folder)"
    for why in ("2 .heic", "1 .mov", "1 hidden", too_deep, "1 beside the class folders"):
        assert why in left_out["what"]
    assert left_out["count"] == 6
    assert {"file": f"{tmp_path}/B/._3.Jpeg"} in left_out["places"]


def test_one_class_and_a_few(tmp_path, capsys):
    status, found = examine(class_folders(tmp_path / "one", [0] * 4))
    assert (status, set(found)) == (1, {"class-only-one"})
    assert "it is called class0 (expected ROOT/CLASS/IMAGE)" in found["class-only-one"]["what"]
    assert examine(class_folders(tmp_path / "few", [0, 1] * 2)) == (0, {})
    assert "class-few (2): classes have images, fewer than 10" in capsys.readouterr().out


def test_whole_photos(tmp_path, capsys):
    """Half of them are 3 : 4 and large; a third of the set's area is not seen."""
    for seed in range(4):
        (tmp_path / f"{seed % 2}").mkdir(exist_ok=True)
        size = (240, 320) if seed < 2 else (200, 200)
        image = cv2.resize(np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8), size)
        content = cv2.imencode(".jpg", image)[1].tobytes()
        (tmp_path / f"{seed % 2}/{seed}.jpg").write_bytes(content)
    status, found = examine(tmp_path)
    assert (status, set(found)) == (0, {"image-photo"})
    assert found["image-photo"]["count"] == 2
    assert "of the median one 25% is cut off" in found["image-photo"]["what"]
    assert f"{tmp_path}/0/0.jpg, class 0, height 320, width 240" in capsys.readouterr().out


HALF = [True, False] * 10


def write_20(path: Path, same: list[bool] = HALF, **replace: bytes) -> Path:
    """20 pairs of pictures 0 to 39; replace: im3=... of image 3."""
    write_pairs(path, [replace.get(f"im{i}", picture(i)) for i in range(40)], same)
    return path


def test_pairs(tmp_path):
    assert examine(write_20(tmp_path / "good.bin")) == (0, {})
    status, found = examine(write_20(tmp_path / "one.bin", [True] * 20))
    assert (status, set(found)) == (1, {"pairs-one-answer"})
    status, found = examine(write_20(tmp_path / "bad.bin", im3=b"x"))
    assert (status, found["image-undecodable"]["count"]) == (1, 1)


def test_pairs_beside_a_set_that_holds_their_images(tmp_path):
    folder = write(tmp_path / "set", records())
    write_20(folder / "test.bin")  # the set has pictures 1 to 14
    status, found = examine(folder)
    assert (status, set(found)) == (0, {"pairs-trained-on"})
    assert [place["image"] for place in found["pairs-trained-on"]["places"]] == list(range(1, 15))
    (folder / "test.bin").write_bytes(b"rubbish")
    assert examine(folder)[0] == 1


def test_nothing_to_look_at(tmp_path, capsys):
    for source in (tmp_path / "missing", tmp_path):
        assert doctor_data(DataOptions(source, bar=False)) == 2
        assert "expected" in capsys.readouterr().out or source == tmp_path
