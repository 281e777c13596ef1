"""Pictures of an evaluation for a person to look at: similarities of both kinds of pairs, captioned images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.evaluate.roc import Roc

Pixels = NDArray[np.uint8]
SIDE = 96  # pixels; a smaller image is enlarged by a whole number, a larger one made as small
_LINE, _GAP, _TITLE = 14, 8, 26
RED, GREEN = (60, 60, 230), (90, 180, 60)  # blue, green, red, as OpenCV has it
_GREY, _WHITE = (64, 64, 64), (255, 255, 255)
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def shown(image_HWC: Pixels, side: int = SIDE) -> Pixels:
    """An RGB or grey image as blue, green, red, enlarged by a whole number or made as small as side."""
    zoom = max(1, side // max(image_HWC.shape[:2]))
    image: Any = image_HWC.repeat(zoom, 0).repeat(zoom, 1)
    if max(image.shape[:2]) > side:
        height, width = (max(1, round(n * side / max(image.shape[:2]))) for n in image.shape[:2])
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, -1)
    return cv2.cvtColor(image, cv2.COLOR_RGB2BGR if image.shape[2] == 3 else cv2.COLOR_GRAY2BGR)


def tile(image_HWC: Pixels, side: int = SIDE) -> Pixels:
    """The same in the middle of a grey square."""
    image, place = shown(image_HWC, side), np.full((side, side, 3), 64, np.uint8)
    top, left = (side - image.shape[0]) // 2, (side - image.shape[1]) // 2
    place[top : top + image.shape[0], left : left + image.shape[1]] = image
    return place


def captioned(tiles: Sequence[Pixels], lines: Sequence[str], colour: tuple[int, int, int] | None = None) -> Pixels:
    """Tiles side by side, lines of text below them, colour: of a bar at the top."""
    picture = np.concatenate(tiles, axis=1)
    if colour:
        picture[:4] = colour
    picture = np.pad(picture, ((0, _LINE * len(lines) + 6), (_GAP // 2, _GAP // 2), (0, 0)))
    picture[-_LINE * len(lines) - 6 :] = _GREY
    picture[:, : _GAP // 2] = picture[:, -_GAP // 2 :] = _GREY
    for number, line in enumerate(lines):
        # OpenCV draws ASCII alone. The end of a long line says more than its beginning.
        text = line.encode("ascii", "backslashreplace").decode()
        while cv2.getTextSize(text, _FONT, 0.38, 1)[0][0] > picture.shape[1] - _GAP:
            text = ".." + text[3:]
        corner = (_GAP // 2, picture.shape[0] - _LINE * (len(lines) - number) + 8)
        cv2.putText(picture, text, corner, _FONT, 0.38, _WHITE, 1, cv2.LINE_AA)
    return picture


def sheet(parts: Sequence[tuple[str, Sequence[Pixels]]], across: int) -> Pixels:
    """Titles, each with its captioned tiles below, so many in a row. All tiles are of one size."""
    height, width = parts[0][1][0].shape[:2]
    rows = []
    for title, tiles in parts:
        head = np.full((_TITLE, width * across, 3), 24, np.uint8)
        cv2.putText(head, title, (_GAP // 2, _TITLE - 8), _FONT, 0.5, _WHITE, 1, cv2.LINE_AA)
        rows.append(head)
        for start in range(0, len(tiles), across):
            row = np.full((height, width * across, 3), 64, np.uint8)
            for place, one in enumerate(tiles[start : start + across]):
                row[:, place * width : (place + 1) * width] = one
            rows.append(row)
    return np.concatenate(rows)


def write_png(path: Path, picture: Pixels) -> None:
    if not cv2.imwrite(str(path), picture):
        raise OSError(0, "the picture could not be written", str(path))


def plot_similarities(curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.bool_], Roc]], path: Path) -> None:
    """Histograms of the cosines of both kinds of pairs, one above the other for each set, by name: (squared distances,
    same, ROC), with the best threshold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 2.6 * len(curves)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    lowest = min(float((1 - distance_N / 2).min()) for distance_N, _, _ in curves.values())
    bins = np.linspace(max(-1.0, np.floor(lowest * 10) / 10), 1, 91)
    all_axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, (distance_N, same_N, roc)) in zip(all_axes, curves.items(), strict=True):
        cosine_N = 1 - distance_N / 2
        for kind, which, colour in (("different", ~same_N, "tab:orange"), ("same", same_N, "tab:blue")):
            share = np.full(int(which.sum()), 100 / which.sum())
            label = f"{kind}: {len(share):,} pairs"
            axes.hist(cosine_N[which], bins, weights=share, color=colour, alpha=0.6, label=label)
        best = roc.best()
        label = f"threshold {best.cosine:.4f}: {best.accuracy:.2%} right"
        axes.axvline(best.cosine, color="0.2", linestyle="--", label=label)
        axes.set(title=name, ylabel="% of its kind")
        axes.legend(fontsize=9)
    all_axes[-1].set_xlabel("cosine of the two embeddings")
    figure.savefig(path, format="png")
