"""A set with changed labels, and the table of changes: what it does, and how it is refused."""

import pickle

import numpy as np
import pytest

from partial_fc.data.sample import identity
from partial_fc.data.sets.changed import Change, Changed, open_changed, read_changes, write_changes
from partial_fc.data.sets.joined import as_joined, open_sets
from tests.world.made import class_folders

CHANGES = (
    Change("merge", -1, 5, 2, 1.0, "alike"),
    Change("merge", -1, 2, 0, 0.95, "and these"),
    Change("move", 4, 1, 5, 0.9, "it is\tof 5"),  # which is 0 by then
    Change("drop", 7, 1, -1, 0.8, "nobody"),
    Change("drop", 0, 0, -1, 0.7, "nobody"),
    Change("split", 12, 3, 20, 0.6, "two"),
    Change("split", 13, 3, 20, 0.6, "two"),
)
NOW = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 3 + 1, 3 + 1, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0]


@pytest.fixture
def folder(tmp_path):
    """24 images of 6 classes, and tmp_path/changes.tsv."""
    folder = class_folders(tmp_path / "set", 6, 4)
    write_changes(tmp_path / "changes.tsv", as_joined([folder], open_sets([folder])), CHANGES)
    return folder


def changed(folder, path=None):
    return open_changed([folder], False, path or folder.parent / "changes.tsv")


def test_every_way_of_reading_has_the_changes(folder):
    """Classes 0, 2 and 5 are one; images 0 and 7 are gone; images 12 and 13 are a class of their own, the last."""
    plain, source = open_sets([folder]), changed(folder)
    kept = [i for i in range(24) if i not in (0, 7)]
    assert (len(source), source.num_classes) == (22, 5)
    assert source.labels().tolist() == NOW
    assert [source.read(i).label for i in range(22)] == NOW
    assert [source.read(i).key for i in range(22)] == [*range(22)]
    assert [source.read(i).data for i in range(22)] == [plain.read(i).data for i in kept]
    assert [source.where(i) for i in range(22)] == [plain.where(i) for i in kept]
    assert source.class_names() == ["id000", "id001", "id003", "id004", "id003 (2)"]
    assert source.sets == [("set", 22, 1.0)]
    source.will_need([0, 6, 21])
    again = pickle.loads(pickle.dumps(source))
    assert again.labels().tolist() == NOW
    assert identity(source) == identity(again) != identity(plain)


def test_several_sets_lose_their_own_images(tmp_path):
    sets = [class_folders(tmp_path / name, 6, 4) for name in ("a", "b")]
    whole = open_sets(sets)
    write_changes(tmp_path / "t", whole, [Change("drop", 30, 7, -1, 1, ""), Change("move", 2, 0, 11, 1, "")])
    source = open_changed(sets, False, tmp_path / "t")
    assert source.sets == [("a", 24, 1.0), ("b", 23, 1.0)]
    assert source.set_of(np.array([23, 24, 46])).tolist() == [0, 1, 1]
    assert source.where(30) == whole.where(31)
    assert source.read(2).label == 11


def test_vectors_are_read_at_once(tmp_path):
    row_ND, label_N = np.eye(8, dtype=np.float32), np.arange(8) % 4
    np.savez(tmp_path / "v.npz", embeddings=row_ND, labels=label_N)
    whole = as_joined([tmp_path / "v.npz"], open_sets([tmp_path / "v.npz"], vectors=True))
    write_changes(tmp_path / "t", whole, [Change("drop", 1, 1, -1, 1, ""), Change("move", 2, 2, 0, 1, "")])
    source = Changed(whole, read_changes(tmp_path / "t", whole))
    rows, labels, keys = source.read_batch(np.array([6, 1, 0]))
    assert rows.tolist() == row_ND[[7, 2, 0]].tolist()
    assert (labels.tolist(), keys.tolist()) == ([3, 0, 0], [6, 1, 0])


def test_an_edited_table(folder):
    """A line less is a change less; a spreadsheet adds a mark, line ends of its own and lines of tabs."""
    path = folder.parent / "changes.tsv"
    lines = path.read_text().splitlines()
    edited = [line if "drop\t7" not in line else f"# {line}" for line in lines if not line.startswith("split")]
    # Such programs also quote what has a comma or a quote, and fill lines up with tabs.
    quoted = [
        "\t".join(f'"{text}"' if "," in text or '"' in text else text for text in line.split("\t")) for line in edited
    ]
    path.write_bytes(("\ufeff" + "\t\t\r\n".join([*quoted, "\t\t\t\t\t"])).encode())
    source = changed(folder)
    assert (len(source), source.num_classes) == (23, 4)
    path.write_text("\n".join(lines[:3]))
    assert changed(folder).labels().tolist() == open_sets([folder]).labels().tolist()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mvoe\t3\t0\t1", "line 11: expected move, drop, split, merge"),
        ("move 3 0 1", "line 11: expected move"),
        ("move\t24\t0\t1", "image is '24'; expected 0 to 23"),
        ("move\t3\t0\t-", "to is '-'; expected 0 to 5"),
        ("move\t3\t0\tid001", "to is 'id001'; expected 0 to 5"),
        ("move\t3\t1\t2", "image 3 is of class 0, not 1"),
        ("move\t4\t1\t2", "line 11: image 4 has a change on line 6 already"),
        ("split\t3\t0\t4", "to is '4'; expected 6 to"),
        ("merge\t-\t5\t1", "class 5 is merged into 2 already"),
        ("merge\t-\t0\t5", "class 0 would be merged into itself"),
        ("merge\t-\t1\t6", "to is '6'; expected 0 to 5"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(folder, line, said):
    path = folder.parent / "changes.tsv"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"changes\.tsv, line 1[01]: ") as raised:
        changed(folder)
    assert said in str(raised.value)


def test_the_table_of_other_data_and_other_files(folder, tmp_path):
    other = class_folders(tmp_path / "other", 6, 5)
    with pytest.raises(ValueError, match=r"for other data: samples 24; .* classes 6; --rec is samples 30;"):
        changed(other, tmp_path / "changes.tsv")
    what = "data clean"
    for content, said in ((b"PK\x03\x04" + bytes(30), what), (b"move\t1\t2\t3\n", what), (b"", what),
                          (b"# partial-fc data clean: x\n", "other data: x; --rec")):  # fmt: skip
        (tmp_path / "x.tsv").write_bytes(content)
        with pytest.raises(ValueError, match=f"x.tsv.*{said}"):
            changed(folder, tmp_path / "x.tsv")
