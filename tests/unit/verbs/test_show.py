"""`partial-fc data show`: which images of which set stand where."""

from pathlib import Path

import cv2
import pytest

from partial_fc import pictures
from partial_fc.data.pairs import write_pairs
from partial_fc.verbs.data import show
from partial_fc.verbs.data.pack import PackOptions, pack_images
from recipes.imagenet.make_database import DatabaseOptions, make_lmdb
from tests.unit.doctor_sets import picture


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five classes of four images, of which one is none."""
    for label in range(5):
        (tmp_path / f"photos/é{label}").mkdir(parents=True)
        for number in range(4):
            (tmp_path / f"photos/é{label}/{number}.jpg").write_bytes(picture(10 * label + number))
    (tmp_path / "photos/é1/2.jpg").write_bytes(b"none")
    return tmp_path / "photos"


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Shows a set; the rows that were written as a picture."""
    taken = []

    def draw(rows, across):
        taken.append(rows)
        return sheet(rows, across)

    sheet = pictures.sheet
    monkeypatch.setattr(pictures, "sheet", draw)

    def run(source, **options):
        show.show(show.ShowOptions(source, tmp_path / "sheet.png", **options))
        assert cv2.imread(str(tmp_path / "sheet.png")) is not None
        return taken[-1]

    return run


def names(rows):
    return [[tile.caption[0] for tile in row.tiles] for row in rows]


def test_a_class_a_row_and_which_by_the_seed(photos, shown, capsys):
    rows = shown(photos, classes=9, images=3)
    assert [row.title for row in rows] == [f"class {label} (é{label}): 4 images" for label in range(5)]
    assert all(len(row.tiles) == 3 for row in rows)
    assert names(shown(photos, classes=9, images=3)) == names(rows)
    assert names(shown(photos, classes=9, images=3, seed=1)) != names(rows)
    assert len(shown(photos, classes=2)) == 2
    (bad,) = [tile for row in shown(photos, classes=5) for tile in row.tiles if tile.image is None]
    assert bad.caption == ["2.jpg"]
    assert f"1 sample cannot be used, drawn as crosses; the first: {photos}/é1/2.jpg: no im" in capsys.readouterr().out


def test_records_databases_lists_and_pairs(photos, shown, tmp_path):
    (photos / "é1/2.jpg").write_bytes(picture(99))
    pack_images(PackOptions(photos, tmp_path / "rec", image_size=24))
    write_pairs(tmp_path / "rec/test.bin", [picture(i) for i in range(8)], [True, False] * 2)
    rows = shown(tmp_path / "rec", classes=1, images=9)
    assert rows[0].title.endswith("4 images")
    assert names(rows[1:]) == [["pair 0", "pair 2"], ["pair 1", "pair 3"]]
    assert rows[1].tiles[0].image.shape == (2 * pictures.SIDE, pictures.SIDE, 3)
    assert len(shown(tmp_path / "rec/test.bin")) == 2
    make_lmdb(DatabaseOptions(photos, tmp_path / "lmdb"))
    assert [len(row.tiles) for row in shown(tmp_path / "lmdb")] == [4] * 5
    (tmp_path / "list").write_text("photos/é0/1.jpg 7\n")
    assert names(shown(tmp_path / "list")) == [["1.jpg"]]
