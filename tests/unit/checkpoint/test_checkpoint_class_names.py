"""Names of classes: what data sets say, and whether a checkpoint means the same numbers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from partial_fc.checkpoint.class_names import check_class_names, names_of, read_names
from partial_fc.data import open_source
from partial_fc.verbs.data.pack import PackOptions, pack_images
from tests.unit.verbs.test_pack import make_images


class Named:
    """A source, as far as names are concerned."""

    def __init__(self, *names: str):
        self.names = list(names) or None

    def class_names(self):
        return self.names


def found(*names: str):
    return SimpleNamespace(folder=Path("step-1"), class_names=list(names) or None)


def test_folders_and_what_is_packed_from_them_have_the_same_names(tmp_path):
    make_images(tmp_path / "in", [1, 2, 1])
    folder = open_source(tmp_path / "in")
    pack_images(PackOptions(tmp_path / "in", tmp_path / "out", image_size=12))
    packed = open_source(tmp_path / "out")
    assert folder.class_names() == packed.class_names() == ["class0", "class1", "class2"]
    (tmp_path / "out/classes.txt").write_text("a\nb\nc\nd\n")
    with pytest.raises(ValueError, match=r"classes.txt names 4 classes, .*train.rec has 3"):
        packed.class_names()
    (tmp_path / "out/classes.txt").unlink()
    assert packed.class_names() is None


def test_classes_beyond_the_sources_are_called_by_number():
    assert names_of(Named("a", "b"), 4) == ["a", "b", "2", "3"]
    assert names_of(Named(), 4) is None


def test_what_a_line_cannot_hold_is_escaped():
    assert names_of(Named("a\nb", "c\udce4", "Zoë"), 3) == ["a\\nb", "c\\xe4", "Zoë"]


def test_equal_names_pass():
    assert check_class_names(found("a", "b"), Named("a", "b")) == []
    assert check_class_names(found("a", "b", "2"), Named("a", "b")) == []
    assert check_class_names(found(), Named()) == []


def test_names_on_one_side_only_are_told():
    (note,) = check_class_names(found("a"), Named())
    assert note.startswith("step-1 has names for its classes, the data set has none")
    (note,) = check_class_names(found(), Named("a"))
    assert note.startswith("the data set has names for its classes, step-1 has none")


def test_names_are_read_line_by_line(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes("a\r\nb\u2028c\nd e".encode())
    assert read_names(path) == ["a", "b\u2028c", "d e"]
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"names.txt is not UTF-8"):
        read_names(path)
    with pytest.raises(ValueError, match=r"nothing: No such file"):
        read_names(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("stored", "now", "message"),
    [
        (("a", "c"), ("a", "b", "c"), "class 1 is 'c'; it is 'b' in the data set, which has 3 classes, the .* 2"),
        (("a", "b"), ("a", "b", "c"), "class 2 is not there; it is 'c'"),
        (("a", "b", "c"), ("a", "b"), "class 2 is 'c'; it is '2' in the data set"),
    ],
)
def test_the_first_difference_is_named_with_what_to_do(stored, now, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_class_names(found(*stored), Named(*now))
    assert "checkpoint classes match step-1 --data DATA --out NEW" in str(caught.value)
