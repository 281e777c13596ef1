"""Photos for who has none at hand: folders of class folders, cut out of the sample pictures that scikit-image and
matplotlib are installed with. Nothing is downloaded; equal arguments give equal files.

    python tests/recipes/own_photos.py             ./photos: 12 classes of 20 photos; ./unseen: 20 other classes

A class is a quarter of a picture; its photos differ in what is cut out, in how they are turned, and in light, sharpness
and noise.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

# Of scikit-image/data, and of matplotlib/mpl-data/sample_data.
PICTURES = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg", "ihc.png",
            "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg", "grace_hopper.jpg")  # fmt: skip
_QUARTERS = "abcd"

Pixels = NDArray[np.uint8]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path(), help="the folder of both; default: here")
    parser.add_argument("--classes", type=int, default=len(PICTURES), help="classes in photos/")
    parser.add_argument("--unseen", type=int, default=20, help="classes in unseen/")
    parser.add_argument("--images", type=int, default=20, help="of each class")
    parser.add_argument("--size", type=int, default=160, help="pixels of a side")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    most = len(PICTURES) * len(_QUARTERS)
    if min(options.classes, options.images, options.size) < 1 or not 0 <= options.unseen <= most - options.classes:
        parser.error(f"expected numbers of 1 or more, and at most {most} classes in both")
    for folder in (options.out / "photos", options.out / "unseen"):
        if folder.exists():
            parser.error(f"{folder} exists; remove it, or give another folder")
    parts = quarters()
    sets = {"photos": parts[: options.classes], "unseen": parts[options.classes :][: options.unseen]}
    for folder, classes in sets.items():
        for name, part in classes:
            (options.out / folder / name).mkdir(parents=True)
            for number in range(options.images):
                rng = np.random.default_rng([options.seed, number, *name.encode()])
                photo = cv2.imencode(".jpg", view(part, options.size, rng), [cv2.IMWRITE_JPEG_QUALITY, 92])[1]
                (options.out / folder / name / f"{number:02}.jpg").write_bytes(photo.tobytes())
        print(f"{options.out / folder}: {len(classes)} classes of {options.images} photos")


def quarters() -> list[tuple[str, Pixels]]:
    """(name, BGR) of each class: first the quarter of each picture that has most to see, then the second ones ..."""
    parts = []
    for file in PICTURES:
        picture = cv2.imread(str(_place(file)), cv2.IMREAD_COLOR)
        assert picture is not None, f"{file} cannot be decoded"
        height, width = (side // 2 for side in picture.shape[:2])
        cut = [picture[y : y + height, x : x + width] for y in (0, height) for x in (0, width)]
        cut.sort(key=lambda part: -float(part.std()))
        parts += [(rank, f"{Path(file).stem}-{_QUARTERS[rank]}", part) for rank, part in enumerate(cut)]
    return [(name, part) for _, name, part in sorted(parts, key=lambda part: part[0])]


def _place(file: str) -> Path:
    # By their folders: skimage.data's functions would fetch what is missing from the net.
    package, below = ("matplotlib", "mpl-data/sample_data") if file == "grace_hopper.jpg" else ("skimage", "data")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pip_name = {"skimage": "scikit-image"}.get(package, package)
        sys.exit(f"own_photos.py: {pip_name} is missing: pip install {pip_name}")
    path = Path(spec.origin).parent / below / file
    if not path.exists():
        sys.exit(f"own_photos.py: {path} not found: a {package} without its sample pictures; take one from PyPI")
    return path


def view(part: Pixels, size: int, rng: np.random.Generator) -> Pixels:
    """A photo of it, size x size."""
    height, width = part.shape[:2]
    side = min(height, width) * rng.uniform(0.65, 0.95)
    x, y = (rng.uniform(side / 2, n - side / 2) for n in (width, height))
    turn = cv2.getRotationMatrix2D((x, y), rng.uniform(-15, 15), size / side)
    turn[:, 2] += (size / 2 - x, size / 2 - y)
    flags = cv2.INTER_AREA if size < side else cv2.INTER_CUBIC
    photo = cv2.warpAffine(part, turn, (size, size), flags=flags, borderMode=cv2.BORDER_REFLECT_101)
    light = 255 * (photo / 255.0) ** rng.uniform(0.7, 1.4) * rng.uniform(0.75, 1.2) * rng.uniform(0.92, 1.08, 3)
    if rng.random() < 0.3:
        light = cv2.GaussianBlur(light, (0, 0), rng.uniform(0.5, 1.2))
    noise = rng.normal(0, rng.uniform(0, 5), light.shape)
    return np.clip(light + noise, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
