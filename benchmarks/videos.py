"""`python -m benchmarks.data --train-list`: speed of reading clips from videos, beside plain PyAV.

Plain PyAV (for folders of frames: OpenCV) decodes and converts the same frames of the same files, seeking by time, the
minimum of any program. It is given the frame numbers; our reader determines the number of frames itself.
"""

import json
from pathlib import Path

import av
import cv2
import numpy as np

from partial_fc.data.order import Keyed
from partial_fc.data.sample import Frames, naming
from recipes.kinetics.video import ClipList, ClipTransform, Window

from .data import DataOptions, in_turn, loaders, print_table, timed


def bench_videos(options: DataOptions) -> None:
    """Measures and prints the results. Raises ValueError, with the file, for an unreadable video."""
    assert options.train_list
    source = ClipList(options.train_list, options.data_dir, 2**31, videos=not options.rawframes)
    size = options.image_size or 224
    transform = ClipTransform(
        window=Window(),
        input_size=size,
        new_width=options.resize * 340 // 256,
        new_height=options.resize,
        random=True,
        mirror=options.mirror,
    )
    count, rng = options.images or 64, np.random.default_rng(0)  # a short list is repeated
    indices = Keyed(len(source), seed=0).select(0, count, 0, 1).index_B.tolist()
    wanted = {index: _choose(source, index, transform.window, rng) for index in indices}
    room = np.empty((transform.window.num_frames, size, size, 3), np.uint8)
    plain, name = (_opencv, "cv2.imread") if options.rawframes else (_plain_pyav, "plain PyAV")
    different = [index for index in indices if plain(Path(source.where(index)), wanted[index]) != len(wanted[index])]
    sides = {
        name: lambda: timed(lambda: [plain(Path(source.where(i)), wanted[i]) for i in indices]),
        "read": lambda: timed(lambda: [_read(source, i, wanted[i]) for i in indices]),
        "read, resize, crop, mirror": lambda: timed(lambda: [transform(source.read(i), rng, room) for i in indices]),
        **loaders(source, transform, options.threads, count, options.batch_size or 2),
    }
    table = in_turn(sides, options.rounds, count, name)
    notes = []
    if different:
        notes = [f"{len(different)} videos, such as {source.where(different[0])}: {name} misses frames of them, whose "
                 "rate varies"]  # fmt: skip
    if options.json:
        print(json.dumps({"clips": count, "sides": table, "left_out": notes}))
        return
    frames = len(set(transform.window.offsets()))
    print(f"{count:,} clips of {frames} frames of {options.train_list}, to {size} x {size} pixels")
    print_table(f"{'':34}   clips/s    CPU ms a clip  ratio to {name}", table, notes, "8,.1f", 1000)


def _choose(source: ClipList, index: int, window: Window, rng: np.random.Generator) -> list[int]:
    """Returns the frames of a clip, ascending."""
    chosen: list[int] = []

    def choose(num_frames: int) -> list[int]:
        chosen.extend(sorted(set(window.numbers(window.random_start(num_frames, rng), num_frames))))
        return chosen

    with naming(source, index):
        for _ in _frames(source, index).read(choose):
            pass
    return chosen


def _frames(source: ClipList, index: int) -> Frames:
    frames = source.read(index).image
    assert isinstance(frames, Frames)
    return frames


def _read(source: ClipList, index: int, wanted: list[int]) -> int:
    return sum(1 for _ in _frames(source, index).read(lambda _: wanted))


def _plain_pyav(path: Path, wanted: list[int]) -> int:
    """Returns how many of the frames it found, by time x rate."""
    found, left = 0, set(wanted)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        first, rate, unit = stream.start_time or 0, stream.average_rate, stream.time_base
        if rate is None or unit is None:
            raise ValueError(f"{path}: no frame rate, by which plain PyAV could seek; leave it out of the list")
        container.seek(first + int(wanted[0] / rate / unit), stream=stream)
        for frame in container.decode(stream):
            number = round(((frame.pts or 0) - first) * unit * rate)
            if number in left:
                frame.to_ndarray(format="rgb24", threads=1)
                found += 1
            if number >= wanted[-1]:
                break
    return found


def _opencv(path: Path, wanted: list[int]) -> int:
    images = [cv2.imread(str(path / f"img_{number + 1:05d}.jpg"), cv2.IMREAD_COLOR_RGB) for number in wanted]
    return sum(image is not None for image in images)
