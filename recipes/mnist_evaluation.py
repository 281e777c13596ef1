"""How well a ConvNet reads digits that it was not trained on, and which ones it reads wrongly.

M mistakes, N test images, C classes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from partial_fc.models.convnet import NUM_CLASSES
from partial_fc.train.running_statistics import joined_statistics
from recipes.mnist_data import Images, pixels

if TYPE_CHECKING:
    from recipes.mnist import Run

_BATCH = 500
_ZOOM, _CAPTION, _ACROSS, _MOST = 3, 18, 10, 60  # of the picture: enlargement, pixels, images


class Evaluation(NamedTuple):
    """Equal on every rank. confusion_CC: int64 counts by (label, prediction). The mistakes, surest first: which test
    image, int64 (M,), what it was taken for, int64 (M,), and how surely, (M,)."""

    confusion_CC: Tensor
    image_M: Tensor
    prediction_M: Tensor
    probability_M: Tensor

    @property
    def num_correct(self) -> int:
        return int(self.confusion_CC.trace())

    @property
    def num_images(self) -> int:
        return int(self.confusion_CC.sum())

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_images

    def __str__(self) -> str:
        return f"Test accuracy: {self.accuracy:.2%} ({self.num_correct:,} of {self.num_images:,})".replace("%", " %")


@torch.no_grad()
def evaluate(run: "Run") -> Evaluation:
    """The test set, each image on one rank: rank r has r, r + W, r + 2W, ..., so nothing is padded. Two collectives and
    those of the statistics. FloatingPointError, on all ranks, where the network's output is not finite."""
    run.model.eval()
    test = run.test_images
    counts = torch.zeros(NUM_CLASSES**2 + 1, dtype=torch.int64)
    mistakes = []
    with joined_statistics(run.model, run.world):
        for index_B in torch.arange(run.world.rank, len(test), run.world.size).split(_BATCH):
            image_B1HW, label_B = test.image_N1HW[index_B], test.label_N[index_B]
            with run.precision.autocast():
                logit_BC = run.model(run.precision.as_input(pixels(image_B1HW.to(run.device))))
            probability_B, prediction_B = (t.cpu() for t in logit_BC.double().softmax(1).max(1))
            cell_B = label_B * NUM_CLASSES + prediction_B
            counts[:-1] += cell_B.bincount(minlength=NUM_CLASSES**2)
            counts[-1] += (~probability_B.isfinite()).sum()
            wrong_B = prediction_B != label_B
            columns = (index_B.double(), prediction_B.double(), probability_B)
            mistakes.append(torch.stack(columns, dim=1)[wrong_B])
    counts = run.world.all_reduce(counts, name="mnist/confusion")
    if counts[-1]:
        raise FloatingPointError(
            f"evaluation after step {run.position.step}: the output is not finite for {counts[-1]} of {len(test)} "
            "images"
        )
    own = torch.cat(mistakes) if mistakes else torch.zeros(0, 3, dtype=torch.float64)
    found = run.world.all_gather(own, name="mnist/mistakes")
    found = found[(-found[:, 2]).argsort(stable=True)]
    return Evaluation(counts[:-1].view(NUM_CLASSES, NUM_CLASSES), found[:, 0].long(), found[:, 1].long(), found[:, 2])


def draw_mistakes(found: Evaluation, test: Images, png: Path) -> int:
    """The surest mistakes, each with its label and what it was taken for, into a picture. Returns how many; where there
    are none there is no picture."""
    number = min(_MOST, len(found.image_M))
    if not number:
        png.unlink(missing_ok=True)
        return 0
    tiles = []
    for index, prediction in zip(found.image_M[:number].tolist(), found.prediction_M[:number].tolist(), strict=True):
        tile = test.image_N1HW[index, 0].numpy().repeat(_ZOOM, 0).repeat(_ZOOM, 1)
        tile = np.pad(tile, ((0, _CAPTION), (1, 1)), constant_values=64)
        place = (6, len(tile) - 5)
        text = f"{test.label_N[index]} as {prediction}"
        tiles.append(cv2.putText(tile, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255,), 1, cv2.LINE_AA))
    tiles += [np.zeros_like(tiles[0])] * (-number % _ACROSS)
    rows = [np.concatenate(tiles[i : i + _ACROSS], axis=1) for i in range(0, len(tiles), _ACROSS)]
    if not cv2.imwrite(str(png), np.concatenate(rows)):
        raise ValueError(f"{png}: cannot be written")
    return number
