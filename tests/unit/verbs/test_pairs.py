"""The .bin files of InsightFace, and drawing pairs."""

import os
import pickle
from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data.decode import decode
from partial_fc.data.pairs import read_pairs, write_pairs
from partial_fc.verbs.data.draw_pairs import PairsOptions, draw_pairs, make_pairs
from tests.unit.verbs.test_pack import make_images

IMAGES = [b"\xff\xd8 one", b"two\x00", b"", bytes(range(256))]


def test_what_we_write_insightface_reads(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a.bin", IMAGES, [True, False])
    with open(tmp_path / "a.bin", "rb") as file:
        assert pickle.load(file, encoding="bytes") == (IMAGES, [True, False])
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def objects(values: list[np.ndarray]) -> np.ndarray:
    out = np.empty(len(values), object)
    out[:] = values
    return out


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    ("images", "same"),
    [
        (IMAGES, [True, False]),
        ([bytearray(image) for image in IMAGES], (1, 0)),
        ([np.frombuffer(image, np.uint8) for image in IMAGES], [np.bool_(True), np.bool_(False)]),
        (IMAGES, np.array([True, False])),
        (np.array(IMAGES, object), np.array([True, 0], object)),
        (objects([np.frombuffer(image, np.uint8) for image in IMAGES]), [True, False]),
    ],
)
def test_what_others_write_we_read(tmp_path: Path, protocol: int, images: object, same: object) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps((images, same), protocol=protocol))
    pairs = read_pairs(tmp_path / "a.bin")
    assert pairs.images == IMAGES
    assert pairs.same.tolist() == [True, False]


def test_python_2_strings(tmp_path: Path) -> None:
    # What Python 2 wrote for (["abc", "\xff\xd8"], [True]): its str, opcode U, is bytes.
    (tmp_path / "a.bin").write_bytes(b"\x80\x02]q\x00(U\x03abcq\x01U\x02\xff\xd8q\x02e]q\x03\x88a\x86q\x04.")
    assert read_pairs(tmp_path / "a.bin").images == [b"abc", b"\xff\xd8"]
    # Its default protocol, 0: text with escapes, opcode S.
    (tmp_path / "a.bin").write_bytes(b"((lp0\nS'abc'\np1\naS'\\xff\\xd8'\np2\na(lp3\nI01\natp4\n.")
    assert read_pairs(tmp_path / "a.bin").images == [b"abc", b"\xff\xd8"]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


def test_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        Path("a.bin").write_bytes(pickle.dumps(([Evil()], []), protocol=protocol))
        with pytest.raises(ValueError, match=r"a\.bin cannot .* asks for posix\.mkdir"):
            read_pairs("a.bin")
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((IMAGES, [True]), "got 4 images for 1 pairs"),
        ("images", "got a str"),
        ((IMAGES, [0, 2]), r"issame holds \[0, 2\]"),
        ((IMAGES, [b"0", b"1"]), "expected booleans only"),
        (([b"", b"", b"", None], [0, 1]), "image 3 of pair 1: got NoneType"),
        (b"rubbish", r"a\.bin cannot be read"),
        (pickle.dumps((IMAGES, [True, False]))[:-20], r"a\.bin cannot be read"),
    ],
)
def test_other_content(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.bin")


def test_drawn_pairs() -> None:
    rng = np.random.default_rng(0)
    label_N = rng.permutation(np.repeat(np.arange(40), rng.integers(1, 9, 40)))
    pair_P2, same_P = draw_pairs(label_N, 120, folds=4, seed=3)
    assert np.array_equal(label_N[pair_P2[:, 0]] == label_N[pair_P2[:, 1]], same_P)
    assert len({frozenset(pair) for pair in pair_P2.tolist()}) == 120  # none twice, no image with itself
    assert same_P.reshape(4, 30).sum(axis=1).tolist() == [15] * 4
    classes = [set(label_N[fold].ravel().tolist()) for fold in pair_P2.reshape(4, 30, 2)]
    assert sum(len(fold) for fold in classes) == len(set().union(*classes))
    assert np.array_equal(pair_P2, draw_pairs(label_N, 120, 4, seed=3)[0])
    assert not np.array_equal(pair_P2, draw_pairs(label_N, 120, 4, seed=4)[0])


def test_all_pairs_of_one_class_can_be_drawn() -> None:
    label_N = np.repeat([0, 1], [5, 2])  # 10 + 1 pairs of one class, 10 of two
    pair_P2, _ = draw_pairs(label_N, 20, folds=1, seed=0)
    assert len({frozenset(pair) for pair in pair_P2.tolist()}) == 20
    with pytest.raises(
        ValueError, match=r"10 pairs of one class or of two, expected 12 of each; --folds 1 --num-pairs 20"
    ):
        draw_pairs(label_N, 24, folds=1, seed=0)
    with pytest.raises(ValueError, match="expected a multiple of 20"):
        draw_pairs(label_N, 30, folds=10, seed=0)


def test_from_a_folder_and_from_a_list(tmp_path: Path) -> None:
    make_images(tmp_path / "images", [3, 2, 4, 2])
    make_pairs(PairsOptions(tmp_path / "images", tmp_path / "a.bin", num_pairs=8, folds=2, image_size=10))
    with pytest.raises(ValueError, match=r"a\.bin exists"):
        make_pairs(PairsOptions(tmp_path / "images", tmp_path / "a.bin"))
    drawn = read_pairs(tmp_path / "a.bin")
    assert drawn.same.tolist() == [True, False, True, False] * 2
    assert decode(drawn.images[0]).shape == (10, 10, 3)

    (tmp_path / "pairs.txt").write_text("class0/0.png class0/1.png 1\n\nclass0/0.png\tclass2/3.png\t0\n")
    make_pairs(PairsOptions(tmp_path / "pairs.txt", tmp_path / "b.bin", root=tmp_path / "images", image_size=None))
    listed = read_pairs(tmp_path / "b.bin")
    assert listed.same.tolist() == [True, False]
    assert listed.images[3] == (tmp_path / "images/class2/3.png").read_bytes()


def test_bad_pair_lists(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("a b 1\na b 2\n")
    with pytest.raises(ValueError, match=r"pairs.txt, line 2: .*'a b 2'"):
        make_pairs(PairsOptions(path, tmp_path / "a.bin"))
    path.write_text("a b 1\n")
    with pytest.raises(ValueError, match=r"2 images .*/a; .*--root"):
        make_pairs(PairsOptions(path, tmp_path / "a.bin"))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((3, 3), np.uint8))
    (tmp_path / "b").write_text("no image")
    path.write_text("a.png b 1\n")
    with pytest.raises(ValueError, match=r"/b: no image that OpenCV can read"):
        make_pairs(PairsOptions(path, tmp_path / "a.bin"))
