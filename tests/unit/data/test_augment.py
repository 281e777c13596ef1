import cv2
import numpy as np
import pytest

from partial_fc.data.augment import affine, glyph
from partial_fc.data.transform import mirror


def random_image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def warp(image: np.ndarray, matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return cv2.warpAffine(image, matrix, size[::-1], flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)


@pytest.mark.parametrize("shape", [(40, 40, 3), (41, 33, 3), (17, 40, 1)])
def test_glyph_depends_on_the_generator_only(shape: tuple[int, ...]) -> None:
    image = random_image(*shape)
    before = image.copy()
    once, again = (glyph(image, np.random.default_rng(7)) for _ in range(2))
    assert once.shape == shape
    assert once.dtype == np.uint8
    np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(image, before)
    assert (once != glyph(image, np.random.default_rng(8))).any()


def test_glyph_keeps_grey_grey() -> None:
    image = np.repeat(random_image(40, 40, 1), 3, axis=2)
    for seed in range(10):
        out = glyph(image, np.random.default_rng(seed))
        assert (out == out[:, :, :1]).all()


def test_glyph_fills_with_the_colour_of_the_paper() -> None:
    """A blank sheet stays one: no black corners come in from outside."""
    paper = np.full((40, 40, 3), 128, np.uint8)
    for seed in range(20):
        out = glyph(paper, np.random.default_rng(seed)).astype(int)
        assert abs(out - np.median(out)).max() <= 8 * 3**0.5 + 1  # the widest uniform noise


def test_glyph_is_never_mirrored() -> None:
    """Over many draws, what was dark on the left stays on the left."""
    image = np.full((40, 40, 3), 250, np.uint8)
    image[5:35, 5:12] = 10
    for seed in range(50):
        out = glyph(image, np.random.default_rng(seed)).astype(int)
        assert out[:, :20].mean() < out[:, 20:].mean()


def test_mirror_every_second_time() -> None:
    image = random_image(5, 7, 3)
    mirrored = 0
    for seed in range(200):
        out = mirror(image.copy(), np.random.default_rng(seed))
        if (out == image[:, ::-1]).all():
            mirrored += 1
        else:
            np.testing.assert_array_equal(out, image)
    assert 70 < mirrored < 130


def test_affine_identity_and_quarter_turn() -> None:
    image = random_image(9, 9)
    still = affine((9, 9), (9, 9), degrees=0, slant=0, scale=(1, 1), move=(0, 0))
    np.testing.assert_allclose(still, [[1, 0, 0], [0, 1, 0]], atol=1e-12)
    turned = affine((9, 9), (9, 9), degrees=90, slant=0, scale=(1, 1), move=(0, 0))
    np.testing.assert_array_equal(warp(image, turned, (9, 9)), np.rot90(image, -1))  # clockwise


def test_affine_scale_enlarges_about_the_centre() -> None:
    image = np.zeros((21, 21), np.uint8)
    image[8:13, 9:12] = 255
    matrix = affine((21, 21), (21, 21), degrees=0, slant=0, scale=(3, 1), move=(0, 0))
    rows, columns = np.nonzero(warp(image, matrix, (21, 21)) > 127)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (8, 12, 6, 14)
