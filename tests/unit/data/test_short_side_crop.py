"""Pixels of recipe `imagenet`: Caffe2's crop of an image, and what becomes of it before the network."""

import cv2
import numpy as np
import pytest
import torch

from partial_fc.data import BadRecord
from partial_fc.data.sample import Sample
from partial_fc.data.transform import ShortSideCrop
from partial_fc.models.inputs import TORCHVISION, Pixels

SIZES = [(40, 60), (60, 40), (41, 67), (24, 24), (7, 11), (11, 7), (24, 37), (300, 25)]


def image(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, channels), np.uint8)


def reference(rgb: np.ndarray, resize: int) -> np.ndarray:
    """The whole resized image: the shorter side is `resize`, the other one truncated."""
    height, width = rgb.shape[:2]
    if height < width:
        size = (int(width * resize / height), resize)
    else:
        size = (resize, int(height * resize / width))
    found = cv2.resize(rgb, size, interpolation=cv2.INTER_AREA)
    return found if found.ndim == 3 else found[..., None]


def crop(rgb: np.ndarray | bytes, seed: int = 0, **more) -> np.ndarray:
    return ShortSideCrop(24, 17, **more)(Sample(rgb, 0, 0), np.random.default_rng(seed))


@pytest.mark.parametrize("size", SIZES)
def test_the_middle(size):
    whole = reference(image(*size), 24)
    top, left = ((n - 17) // 2 for n in whole.shape[:2])
    np.testing.assert_array_equal(crop(image(*size), random=False), whole[top : top + 17, left : left + 17])


@pytest.mark.parametrize("size", SIZES)
def test_crops_at_random_and_mirrored(size):
    """Each of them is a piece of the image; offsets reach both ends, and every second one is mirrored."""
    whole = reference(image(*size), 24)
    spare = [n - 17 for n in whole.shape[:2]]
    places = {
        whole[top : top + 17, left : left + 17][:, ::step].tobytes(): (top, left, step)
        for top in range(spare[0] + 1)
        for left in range(spare[1] + 1)
        for step in (1, -1)
    }
    found = [places[crop(image(*size), seed, random=True, mirror=True).tobytes()] for seed in range(300)]
    for axis, most in enumerate(spare):
        drawn = [place[axis] for place in found]
        assert min(drawn) <= most // 10
        assert max(drawn) >= most - most // 10
    assert 110 < sum(place[2] for place in found) / 2 + 150 < 190
    assert {places[crop(image(*size), seed, random=True).tobytes()][2] for seed in range(20)} == {1}


def test_files_and_grey():
    rgb = image(40, 60)
    file = cv2.imencode(".png", rgb[..., ::-1])[1].tobytes()
    np.testing.assert_array_equal(crop(file, random=False), crop(rgb, random=False))
    for size in ((40, 60), (24, 30), (17, 17)):
        grey = crop(image(*size, 1), random=False)
        assert grey.shape == (17, 17, 3)
        assert (grey == grey[..., :1]).all()
        whole = reference(image(*size, 1), 24)
        top, left = ((n - 17) // 2 for n in whole.shape[:2])
        np.testing.assert_array_equal(grey[..., :1], whole[top : top + 17, left : left + 17])
    before = image(24, 30)
    ShortSideCrop(24, 24, random=True, mirror=True)(Sample(before, 0, 0), np.random.default_rng(1))
    np.testing.assert_array_equal(before, image(24, 30))


def test_an_image_that_is_all_length():
    with pytest.raises(BadRecord, match="image of 65 x 1 pixels"):
        crop(image(1, 65), random=False)


def test_what_the_network_gets():
    pixel_B = torch.arange(2 * 3 * 2, dtype=torch.uint8).view(2, 3, 2, 1)
    caffe2 = Pixels("BGR", (1.0, 2.0, 3.0), (2.0, 4.0, 8.0), bgr=True)(pixel_B)
    for channel, (theirs, mean, std) in enumerate(((2, 1, 2), (1, 2, 4), (0, 3, 8))):
        assert torch.equal(caffe2[:, channel], (pixel_B[:, theirs].float() - mean) / std)
    rgb = TORCHVISION(pixel_B)
    for channel, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        torch.testing.assert_close(rgb[:, channel], (pixel_B[:, channel].float() / 255 - mean) / std)
    clip = Pixels("BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0), bgr=True)(pixel_B.unsqueeze(2))
    assert clip.shape == (2, 3, 1, 2, 1)
    assert clip[0, 0, 0, 0, 0] == pixel_B[0, 2, 0, 0] - 1
