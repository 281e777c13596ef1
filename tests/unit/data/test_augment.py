import cv2
import numpy as np
import pytest

from partial_fc.data.augment import FACE, PHOTO, Distortions, affine, glyph, photometric
from partial_fc.data.loader import Loader
from partial_fc.data.sample import Synthetic
from partial_fc.data.transform import mirror, training_square


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


# ---- faces and photos


def photo(side: int = 48) -> np.ndarray:
    """A smooth image, in which a distortion shows."""
    return cv2.resize(random_image(6, 6, 3), (side, side), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("name", ["crop", "low_resolution", "photometric", "blur", "grey", "jpeg", "erase"])
def test_a_distortion_depends_on_the_generator_only(name):
    image = photo()
    whole = Distortions(**{name: 1.0})
    for seed in range(5):
        once, again = (whole(image.copy(), np.random.default_rng(seed)) for _ in range(2))
        assert (once.shape, once.dtype) == (image.shape, np.uint8)
        np.testing.assert_array_equal(once, again)
        assert (once != image).any()
    np.testing.assert_array_equal(Distortions()(image.copy(), np.random.default_rng(0)), image)


def test_each_chance_is_met():
    """A crop leaves black, erasing one colour, grey three equal channels: counted over many draws."""
    image = np.full((32, 32, 3), (200, 100, 50), np.uint8)
    rng = np.random.default_rng(0)
    outs = [Distortions(crop=0.2, grey=0.05)(image.copy(), rng) for _ in range(2000)]
    assert 0.15 < np.mean([(out == 0).any() for out in outs]) < 0.25
    assert 0.03 < np.mean([(out == out[:, :, :1]).all() for out in outs]) < 0.07


def test_photometric_is_its_formula():
    image = photo()
    grey = np.array([0.299, 0.587, 0.114])
    x = image * 1.2
    mean = (image.mean((0, 1)) * 1.2) @ grey
    x = mean + 0.7 * (x - mean)
    x = (x @ grey)[..., None] + 1.4 * (x - (x @ grey)[..., None])
    assert abs(photometric(image, 1.2, 0.7, 1.4) - np.clip(x, 0, 255)).max() < 1


@pytest.mark.parametrize("distort", [FACE, PHOTO])
def test_augmented_batches_are_the_same_for_any_number_of_ranks(distort):
    name = "face" if distort is FACE else "photo"

    def images(rank: int, world_size: int, position: int = 0) -> np.ndarray:
        with Loader(
            *(Synthetic(3, 40, 50), training_square(24, name, mirrored=True)), rank=rank, world_size=world_size,
            batch_size=12 // world_size, seed=5, position=position,
        ) as loader:  # fmt: skip
            return np.concatenate([next(loader).input_B.numpy() for _ in range(3)])

    whole = images(0, 1)
    halves = [images(rank, 2).reshape(3, 6, *whole.shape[1:]) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1).reshape(whole.shape), whole)
    np.testing.assert_array_equal(images(0, 1, position=12)[:24], whole[12:])
