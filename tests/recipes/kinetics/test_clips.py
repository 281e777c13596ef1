"""Which frames make a clip, and what is made of them, by GluonCV's rules; lists; testing in several views."""

import re
import socket
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data import Loader, Sample
from recipes.kinetics.make_lists import ListOptions, make_lists
from recipes.kinetics.video import ClipList, ClipTransform, Window
from recipes.kinetics.video.frames import VideoFile
from recipes.kinetics.views import VideoViews
from tests.recipes.kinetics import videos
from tests.unit.thread_world import in_world


def gluoncv_numbers(start: int, num_frames: int, slow_stride: int = 16) -> list[int]:
    """GluonCV's rule, step by step: a cursor from 1 that moves while another frame follows."""
    fast, slow, cursor = [], [], start + 1
    for i in range(64):
        if (i + 1) % 2 == 0:
            fast.append(cursor - 1)
            if (i + 1) % slow_stride == 0:
                slow.append(cursor - 1)
        if cursor + 1 < num_frames:
            cursor += 1
    return fast + slow


@pytest.mark.parametrize(("start", "num_frames"), [(0, 300), (236, 300), (0, 64), (0, 40), (0, 2), (0, 1)])
def test_the_frames_of_a_window(start, num_frames):
    assert Window().numbers(start, num_frames) == gluoncv_numbers(start, num_frames)
    assert Window(slow_stride=8).numbers(start, num_frames) == gluoncv_numbers(start, num_frames, 8)


def test_where_windows_begin():
    window, rng = Window(), np.random.default_rng(0)
    assert window.offsets() == [*range(1, 64, 2), 15, 31, 47, 63]
    assert {window.random_start(70, rng) for _ in range(300)} == set(range(7))
    assert {window.random_start(n, rng) for n in (1, 63, 64) for _ in range(20)} == {0}
    assert [window.segment_start(n) for n in (300, 65, 64, 10)] == [118, 1, 0, 0]
    assert [window.segment_start(300, i, 10) for i in range(10)] == [11, 35, 59, 82, 106, 130, 154, 177, 201, 225]
    with pytest.raises(ValueError, match="multiple of the fast one"):
        Window(fast_stride=3)
    with pytest.raises(ValueError, match="window of 8 frames has no slow frame"):
        Window(length=8)


class Ramp:
    """Frames whose red is their number, green the column, blue the row."""

    def __init__(self, num_frames: int, height: int, width: int):
        self.num_frames, self.shape = num_frames, (height, width)

    def read(self, choose):
        height, width = self.shape
        for number in sorted(set(choose(self.num_frames))):
            frame = np.zeros((height, width, 3), np.uint8)
            frame[..., 0], frame[..., 1], frame[..., 2] = number, np.arange(width), np.arange(height)[:, None]
            yield number, frame


def transform(**more) -> ClipTransform:
    given = {"window": Window(), "input_size": 56, "new_width": 85, "new_height": 64, "scale_ratios": (1.0, 0.8)}
    return ClipTransform(**{**given, **more})


def clip(of: ClipTransform, frames, seed: int = 0, out=None):
    return of(Sample(frames, 0, 0), np.random.default_rng(seed), out)


def test_v1_for_testing_is_the_middle_of_the_resized_frame():
    found = clip(transform(), Ramp(100, 100, 200))
    assert found.shape == (36, 56, 56, 3)
    assert found[:, 0, 0, 0].tolist() == gluoncv_numbers(18, 100)
    (_, frame), *_ = Ramp(100, 100, 200).read(lambda _n: [19])
    resized = cv2.resize(frame, (85, 64), interpolation=cv2.INTER_LINEAR)
    assert (found[0] == resized[4:60, 14:70]).all()


def test_v1_draws_one_crop_for_a_clip():
    of, places, sides = transform(random=True, input_size=48), set(), set()
    seen_mirrored = set()
    for seed in range(400):
        found = clip(of, Ramp(64, 64, 85), seed)
        assert all((frame[..., 1:] == found[0, ..., 1:]).all() for frame in found)
        left, right = sorted(found[0, 0, [0, -1], 1].tolist())
        top, bottom = found[0, [0, -1], 0, 2].tolist()
        sides.add((bottom - top > 55, right - left > 55))
        places.add((top > 0, bottom < 62, left > 1, right < 82))
        seen_mirrored.add(bool(found[0, 0, 0, 1] > found[0, 0, -1, 1]))
    assert seen_mirrored == {False, True}
    assert len(sides) == 4
    # A side of 51 pixels has the whole height or both; the width always has room.
    assert (False, False, True, True) in places
    assert of.sides(64, 85) == [(64, 64), (64, 51), (51, 64), (51, 51)]
    assert transform(random=True, input_size=50, max_distort=0).sides(64, 85) == [(64, 64), (50, 50)]
    assert len(of.places()) == len(set(of.places())) == 13
    assert len(transform(all_places=False).places()) == 5


@pytest.mark.parametrize("kind", ["v2", "v3", "v4"])
def test_other_augmentations_keep_proportions(kind):
    of = transform(kind=kind, random=True, new_height=64, new_width=80)
    found = [clip(of, Ramp(64, 100, 200), seed) for seed in range(12)]
    assert {a.shape for a in found} == {(36, 56, 56, 3)}
    assert len({a[0].tobytes() for a in found}) > 6
    # The frame's columns and rows change by the same number from pixel to pixel, but for what v2 and v4 distort.
    for a in found:
        across, down = np.ptp(a[0, 0, :, 1].astype(int)), np.ptp(a[0, :, 0, 2].astype(int))
        assert 0.7 < across / down < 1.4 or kind == "v2"
    middle = clip(transform(kind=kind, new_height=64, new_width=80), Ramp(64, 100, 200))
    assert abs(int(middle[0, 28, 28, 1]) - 100) <= 2
    assert abs(int(middle[0, 28, 28, 2]) - 50) <= 2


def test_what_does_not_fit_together():
    with pytest.raises(ValueError, match=r"frames are made 85 x 64 .* smaller than the crop, --input-size 65"):
        transform(input_size=65)
    with pytest.raises(ValueError, match="expected a range that rises"):
        transform(kind="v3", random=True, new_width=60)
    with pytest.raises(ValueError, match="--scale-ratios"):
        transform(scale_ratios=(1.2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six videos of two lengths, one of them cut short, with their list."""
    root = tmp_path_factory.mktemp("clips")
    lines = []
    for i in range(6):
        name = f"class_{i % 2}/clip{i}"
        path = videos.write(root / f"{name}.mp4", 70 + 10 * i if i else 30)
        if i == 5:
            path.write_bytes(path.read_bytes()[:-200])
        lines.append(f"{name} 0 {i % 2}\n")
    (root / "list.txt").write_text("".join(lines) + "\n")
    return root


def test_batches_of_videos(folder, caplog):
    source = ClipList(folder / "list.txt", folder, 2, videos=True)
    assert source.labels().tolist() == [0, 1, 0, 1, 0, 1]
    of = transform(input_size=64, random=False)
    with Loader(source, of, batch_size=6, num_workers=0) as loader:
        batches = [next(loader) for _ in range(2)]
    assert batches[0].input_B.shape == (6, 3, 36, 64, 64)
    assert "clip5.mp4: cut short" in caplog.text
    for batch in batches:
        for pixels, key in zip(batch.input_B, batch.key_B.tolist(), strict=True):
            num_frames = 70 + 10 * key if key else 30
            start = of.window.segment_start(num_frames)
            found = VideoFile(folder / f"{source.names[key]}").read(lambda _n, s=start: [s + 1])
            ((_, frame),) = found
            resized = cv2.resize(frame, (85, 64), interpolation=cv2.INTER_LINEAR)[:, 10:74]
            assert (pixels[:, 0].movedim(0, -1).numpy() == resized).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a/b 3", r"line 2: 2 columns, 'a/b 3'; expected `path num_frames label`"),
        ("a/b 70 2", r"line 2: label 2; expected 0 to 1 \(--num-classes 2\)"),
        ("a/b x 1", "line 2: 'a/b x 1'; expected"),
    ],
)
def test_lists_that_say_something_else(line, message, tmp_path):
    (tmp_path / "list.txt").write_text(f"a 70 1\n{line}\n")
    with pytest.raises(ValueError, match=message):
        ClipList(tmp_path / "list.txt", tmp_path, 2, videos=True)


def test_videos_that_are_not_here_are_named_with_the_host(folder):
    source = ClipList(folder / "list.txt", folder / "elsewhere", 2, videos=True)
    here = re.escape(socket.gethostname())
    with pytest.raises(ValueError, match=rf"^{here}: of 3 files of .*list\.txt .* 3 are not there"):
        source.check_present(3)
    ClipList(folder / "list.txt", folder, 2, videos=True).check_present(100)


def test_scores_of_all_views_are_added_by_video(tmp_path):
    for i in range(3):
        videos.write(tmp_path / f"{i}.mp4", 80)
    (tmp_path / "list.txt").write_text("".join(f"{i} 0 {i % 3}\n" for i in range(3)))
    source = ClipList(tmp_path / "list.txt", tmp_path, 3, videos=True)
    of = transform(input_size=64)
    seen = []

    def forward(clip_B):
        assert clip_B.shape[1:] == (3, 36, 64, 64)
        output = clip_B.float().mean((2, 3, 4)) + torch.arange(len(clip_B))[:, None] / 7
        seen.append(output)
        return output

    def measured(world):
        views = VideoViews("test", source, of, 6, num_segments=4, three_crop=True)
        return dict(views.run(forward, world))

    values = measured(SingleWorld())
    output = torch.cat(seen)
    assert output.shape == (3 * 4 * 3, 3)
    score = output.view(3, 12, 3).mean(1)
    assert values["test/accuracy"] == (score.argmax(1) == torch.arange(3)).double().mean()
    assert values["test/top3"] == 1.0
    for size in (2, 3):
        assert in_world(size, measured) == [values] * size
    whole = of.views(source.read(0), 1, 4, three_crop=True)
    assert whole.shape == (3, 36, 64, 64, 3)
    assert not (whole[0] == whole[1]).all()


def test_lists_of_class_folders(folder, tmp_path):
    options = ListOptions(folder, tmp_path / "list.txt")
    with pytest.raises(ValueError, match=r"clip5\.mp4: cut short.*bad video 1, at most 0"):
        make_lists(options)
    make_lists(replace(options, max_bad_records=1))
    expected = ["class_0/clip0.mp4 30 0", "class_0/clip2.mp4 90 0", "class_0/clip4.mp4 110 0"]
    assert options.out.read_text().splitlines() == [*expected, "class_1/clip1.mp4 80 1", "class_1/clip3.mp4 100 1"]
    assert (tmp_path / "list.classes").read_text() == "class_0\nclass_1\n"
    for number in (1, 2, 4):
        path = tmp_path / f"frames/class_1/video/img_{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    frames = ListOptions(tmp_path / "frames", tmp_path / "raw.txt", rawframes=True, classes=tmp_path / "list.classes")
    with pytest.raises(ValueError, match=r"3 images of a video, but no img_00003\.jpg"):
        make_lists(frames)
    path.rename(path.with_name("img_00003.jpg"))
    make_lists(frames)
    assert frames.out.read_text() == "class_1/video 3 1\n"
