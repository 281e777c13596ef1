"""`python -m benchmarks.data`: speed of reading and decoding a training set, by stage, beside other programs' parts.

All sides process the same samples in turn for several rounds, since a machine's speed drifts. The ratio is of CPU
seconds per image, `cv2.imdecode` of the same files over the side, which other load on the machine does not change.
Images a second are wall time. (Videos: bench/videos.py.)
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import cv2
import numpy as np
import tyro
from simplejpeg import decode_jpeg

from partial_fc import terminal
from partial_fc.cli import call
from partial_fc.data.decode import decode
from partial_fc.data.open import open_source
from partial_fc.data.recordio import RecordSource
from partial_fc.data.sample import Sample, Source
from partial_fc.data.transform import ShortSideCrop, SquareImage, mirror
from partial_fc.flags.facts import BATCH, PIXELS, THREADS, In
from recipes.imagenet.databases import open_database

if TYPE_CHECKING:
    from partial_fc.data.build import Transform


@dataclass(frozen=True)
class DataOptions:
    """Reads and decodes images of a training set in several ways, and prints a table."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder with train.rec, a .rec file, a folder of class folders, or a list. Or else:"""
    rec: Path | None = None
    """The same, by recipe face's name for it."""
    train_data: Path | None = None
    """An image database, as recipe imagenet takes it."""
    train_list: Path | None = None
    """A list of videos, as recipe kinetics takes it."""
    data_dir: Path = Path()
    """What the paths of --train-list are relative to."""
    rawframes: bool = False
    """They are folders of frames."""
    image_size: Annotated[int | None, In(PIXELS)] = None
    """Pixels of a side, as the network takes them; none: 112, of a database 227, of videos 224."""
    resize: Annotated[int, In(PIXELS)] = 256
    """The shorter side of a database's images before the crop; the height that frames of videos are made, whose width
    is made 340/256 of it."""
    mirror: bool = True
    """Exchange left and right every second time."""
    images: Annotated[int | None, In(1)] = None
    """So many of the set, in shuffled order, in each round; none: 4000, or 64 videos."""
    batch_size: Annotated[int | None, In(BATCH)] = None
    """Images of a batch; none: 64, of videos 2."""
    threads: Annotated[int, In(THREADS)] = len(os.sched_getaffinity(0))
    """The loader runs with 1, 2, 4, ... up to so many."""
    rounds: Annotated[int, In(1)] = 5
    """The median counts."""
    json: bool = False
    """One line for programs instead of the table."""


@dataclass(frozen=True)
class Speed:
    wall_s: float
    cpu_s: float


def bench_data(options: DataOptions) -> None:
    """Measures and prints the results."""
    paths = [path for path in (options.source, options.rec, options.train_data, options.train_list) if path]
    if len(paths) != 1:
        raise ValueError("give one set: a path, --rec PATH, --train_data PATH or --train-list PATH")
    if options.train_list:
        from .videos import bench_videos  # needs PyAV

        bench_videos(options)
        return
    size = options.image_size or (227 if options.train_data else 112)
    transform: Transform = SquareImage(size, mirror if options.mirror else None)
    source: Source
    if options.train_data:
        source = open_database(options.train_data, None, 2**31)
        transform = ShortSideCrop(options.resize, size, random=True, mirror=options.mirror)
    else:
        source = open_source(paths[0])
    count, batch_size = min(options.images or 4000, len(source)), options.batch_size or 64
    sides, left_out = _sides(options, source, transform, size, count, batch_size)
    table = in_turn(sides, options.rounds, count, "cv2.imdecode")
    if options.json:
        print(json.dumps({"images": count, "sides": table, "left_out": left_out}))
        return
    print(f"{count:,} images of {paths[0]}, to {size} x {size} pixels")
    print_table(f"{'':34}  images/s  CPU us an image  ratio to cv2.imdecode", table, left_out, "8,.0f", 1)


def print_table(head: str, table: list[dict[str, Any]], notes: list[str], rate: str, unit_us: float) -> None:
    """Prints the results. rate: the format of samples a second. unit_us: of the column of CPU time."""
    print(head)
    for row in table:
        cpu = row["cpu_us"] / unit_us
        print(f"{row['side']:34}  {row['images_per_s']:{rate}}  {cpu:15.1f}  {row['ratio']:8.2f}")
    for note in notes:
        print(note)


def in_turn(sides: dict[str, Callable[[], Speed]], rounds: int, count: int, reference: str) -> list[dict[str, Any]]:
    """Measures all sides in each round, after a warm-up round. Returns a row per side."""
    speeds: dict[str, list[Speed]] = {name: [] for name in sides}
    for _ in terminal.bar(range(rounds + 1), desc="rounds", unit="round", leave=False):
        for name, side in sides.items():
            speeds[name].append(side())
    return [_row(name, runs[1:], speeds[reference][1:], count) for name, runs in speeds.items()]


def _row(name: str, runs: list[Speed], reference: list[Speed], count: int) -> dict[str, Any]:
    return {
        "side": name,
        "images_per_s": median(count / run.wall_s for run in runs),
        "cpu_us": median(run.cpu_s for run in runs) / count * 1e6,
        "ratio": median(other.cpu_s / run.cpu_s for run, other in zip(runs, reference, strict=True)),
    }


def _sides(
    options: DataOptions, source: Source, transform: "Transform", size: int, count: int, batch_size: int
) -> tuple[dict[str, Callable[[], Speed]], list[str]]:
    """Returns the compared functions by name, and what could not be compared, with reasons."""
    from partial_fc.data.order import Keyed

    indices = Keyed(len(source), seed=0).select(0, count, 0, 1).index_B.tolist()
    files = [bytes(image) for index in indices if isinstance(image := source.read(index).image, bytes)]
    if len(files) < count:
        raise ValueError("the set holds pixels, not image files: there is nothing to decode")
    place = np.empty((batch_size, size, size, 3), np.uint8)
    rng, resize = np.random.default_rng(0), options.resize if options.train_data else size

    def each(work: Callable[[int, bytes], object]) -> Callable[[], Speed]:
        return lambda: timed(lambda: [work(i, file) for i, file in enumerate(files)])

    sides = {
        "cv2.imdecode": each(lambda i, file: _imdecode(file)),
        "simplejpeg": each(lambda i, file: decode_jpeg(file, "RGB")),
        "decode, resize, crop, mirror": each(lambda i, file: _bare(file, size, resize, i % 2 * options.mirror)),
        "read": lambda: timed(lambda: [source.read(index) for index in indices]),
        "decode": each(lambda i, file: decode(file, place[i % len(place)])),
        "transform": each(lambda i, file: transform(Sample(file, 0, 0), rng, place[i % len(place)])),
    }
    if any(not file.startswith(b"\xff\xd8") for file in files):
        del sides["simplejpeg"]
    sides |= loaders(source, transform, options.threads, count, batch_size)
    if not isinstance(source, RecordSource):
        return sides, ["ImageRecordIter of MXNet is left out: it reads .rec files only"]
    num_labels = len(source.reader.read_sample(int(source.reader.keys[-1]))[0].label)
    asked = {"rec": str(source.reader.rec_path), "size": size, "batch_size": batch_size, "mirrored": options.mirror}
    command = [
        sys.executable,
        "-m",
        "benchmarks.mxnet_iterator",
        json.dumps({**asked, "count": count, "width": num_labels}),
    ]
    problem = _image_record_iter(command)
    if isinstance(problem, str):
        return sides, [f"ImageRecordIter of MXNet is left out: {problem}"]
    return {**sides, "ImageRecordIter, 1 thread": lambda: _image_record_iter(command)}, []


def _imdecode(file: bytes) -> Any:
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)


def _bare(file: bytes, size: int, resize: int, flip: int) -> Any:
    """Does the minimum that any program must do."""
    image = _imdecode(file)
    shorter = min(image.shape[:2])
    if shorter != resize:
        scaled = (image.shape[1] * resize // shorter, image.shape[0] * resize // shorter)
        image = cv2.resize(image, scaled, interpolation=cv2.INTER_AREA)
    top, left = ((n - size) // 2 for n in image.shape[:2])
    image = image[top : top + size, left : left + size]
    return cv2.flip(image, 1) if flip else np.ascontiguousarray(image)


def timed(work: Callable[[], object]) -> Speed:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Speed(time.perf_counter() - wall, time.process_time() - cpu)


def loaders(
    source: Source, transform: "Transform", most_threads: int, count: int, batch_size: int
) -> dict[str, Callable[[], Speed]]:
    """Returns the loader with 1, 2, 4, ... threads."""
    return {
        f"Loader, {threads} thread{'s' if threads > 1 else ''}": partial(
            _loader, source, transform, threads, count, batch_size
        )
        for threads in _powers_of_two(most_threads)
    }


def _loader(source: Source, transform: "Transform", threads: int, count: int, batch_size: int) -> Speed:
    from partial_fc.data.loader import Loader

    batches = max(1, count // batch_size)
    with Loader(source, transform, batch_size=batch_size, num_workers=threads) as loader:
        next(loader)
        # Batches are dropped: as in training, memory is reused.
        speed = timed(lambda: deque((next(loader) for _ in range(batches)), maxlen=0))
    # Threads work ahead by the same amount at start and end.
    share = count / (batches * batch_size)
    return Speed(speed.wall_s * share, speed.cpu_s * share)


def _powers_of_two(most: int) -> Iterator[int]:
    threads = 1
    while threads <= most:
        yield threads
        threads *= 2


def _image_record_iter(command: list[str]) -> Any:
    """Returns MXNet's speed, measured in its own process, or why it is unavailable."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    return Speed(*json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(call(bench_data, sys.argv[1:], "python -m benchmarks.data"))
