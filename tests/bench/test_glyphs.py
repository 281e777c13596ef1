"""The demo's characters: the same bytes again, true labels, characters and typefaces that are never trained."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from demo import make_glyphs as glyphs
from demo.glyphs_fonts import CHINESE, TYPEFACES, Font, find_fonts
from demo.glyphs_pairs import SETS
from demo.make_glyphs import GlyphOptions, build
from partial_fc.data import RecordSource
from partial_fc.data.decode import decode
from partial_fc.data.pairs import read_pairs
from partial_fc.data.recordio import RecordReader

pytestmark = pytest.mark.slow

FONTS = Path("/usr/share/fonts")
SMALL = GlyphOptions(out=Path("unused"), num_classes=12, images_per_typeface=2, num_unseen=60, pairs=60, jobs=1, seed=3)


@pytest.fixture(scope="module")
def fonts() -> Iterator[list[Font]]:
    """Read once: their tables of characters take longer than a small set."""
    fonts = find_fonts(FONTS)
    with pytest.MonkeyPatch.context() as patch:
        known = lambda root, faces=TYPEFACES: fonts[: len(faces)] if root == FONTS else find_fonts(root, faces)  # noqa: E731
        patch.setattr(glyphs, "find_fonts", known)
        yield fonts


@pytest.fixture(scope="module")
def folder(fonts: list[Font], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("glyphs") / "set"
    build(replace(SMALL, out=out))
    return out


def read_pair_list(folder: Path, name: str) -> list[list[str]]:
    """[character, typeface, character, typeface, same|different] of each pair."""
    return [line.split("\t") for line in (folder / f"{name}.tsv").read_text(encoding="utf-8").splitlines()]


def read_classes(folder: Path) -> list[str]:
    return [line.split("\t")[1] for line in (folder / "classes.txt").read_text(encoding="utf-8").splitlines()]


# ---- the same bytes


@pytest.mark.long
def test_a_larger_set_from_more_processes_starts_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    larger = tmp_path / "larger"
    build(replace(SMALL, out=larger, num_classes=15, jobs=2))
    assert read_classes(larger)[:12] == read_classes(folder)
    for name in SETS:
        for file in (f"{name}.bin", f"{name}.tsv"):
            assert (folder / file).read_bytes() == (larger / file).read_bytes(), file
    ours, theirs = (RecordReader(path / "train.rec") for path in (folder, larger))
    assert all(ours.read(key) == theirs.read(key) for key in range(1, 1 + 12 * 7 * 2))


# ---- the training set


def test_no_image_is_blank_or_cut(folder: Path) -> None:
    assert (folder / "property").read_text() == "12,40,40\n"
    source = RecordSource(folder)
    assert np.bincount(source.labels()).tolist() == [7 * 2] * 12
    files = [source.read(i).image for i in range(len(source))]
    assert len(set(files)) == len(files)  # every image has a distortion of its own
    tested = {image for name in SETS for image in read_pairs(folder / f"{name}.bin").images}
    assert len(tested) > 60
    assert not tested & set(files)
    for file in (*files, *tested):
        assert isinstance(file, bytes)
        image = decode(file)
        assert image.shape == (40, 40, 3)
        paper, ink = np.percentile(image, [90, 2])
        assert paper - ink > 40
        # Noise is at most 17 levels from the paper; what is much darker at the rim is a stroke cut off.
        rim = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])[:, 0]
        assert (rim < paper - 60).mean() < 0.05


def test_the_typeface_of_the_tests_is_never_trained(folder: Path) -> None:
    lines = (folder / "train.lst").read_text().splitlines()
    names = {line.split("\t")[1].split("/")[1].rsplit("-", 1)[0] for line in lines}
    assert names == {TYPEFACES[i].name for i in CHINESE} - {"ukai"}


# ---- the verification sets


def test_tested_characters_are_not_trained(folder: Path) -> None:
    unseen = set(json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["unseen"])
    assert len(unseen) == 60
    assert not unseen & set(read_classes(folder))
    for name in SETS:
        shown = {character for line in read_pair_list(folder, name) for character in (line[0], line[2])}
        assert len(shown) > 30
        assert shown <= unseen


@pytest.mark.parametrize("name", SETS)
def test_folds_are_balanced_and_labels_true(folder: Path, name: str) -> None:
    same = read_pairs(folder / f"{name}.bin").same
    lines = read_pair_list(folder, name)
    assert same.reshape(10, 6).sum(axis=1).tolist() == [3] * 10
    assert [line[0] == line[2] for line in lines] == same.tolist()
    assert [line[4] == "same" for line in lines] == same.tolist()
    assert all(line[1] != line[3] for line in lines)
    impostors = [frozenset((line[0], line[2])) for line in lines if line[4] == "different"]
    assert len(set(impostors)) == len(impostors)
    if name == "unseen_font":
        assert all(line[1] == "ukai" and line[3] != "ukai" for line in lines)
    else:
        assert all("ukai" not in line for line in lines)
    if name != "lookalike":
        folds = [{c for line in lines[6 * i : 6 * i + 6] for c in (line[0], line[2])} for i in range(10)]
        assert sum(map(len, folds)) == len(set.union(*folds))


# ---- fonts and what they lack


def test_missing_fonts_name_their_packages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"apt-get install fonts-arphic-ukai fonts-arphic-uming fonts-noto"):
        build(replace(SMALL, out=tmp_path / "set", fonts=tmp_path))
    assert not list(tmp_path.iterdir())
