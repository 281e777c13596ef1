"""Frames of real videos by number: those asked for, in whatever order they are stored, and none decoded twice."""

import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from partial_fc.data.sample import BadRecord
from recipes.kinetics.video import frames
from recipes.kinetics.video.frames import FrameFolder, VideoFile
from tests.recipes.kinetics import videos

N = 120
KEYS = {"g": "30", "bf": "3", "preset": "fast"}
FILES = {
    "b_frames.mp4": (videos.LONG_GOP, None, "libx264"),
    "open_gop.mp4": ({**KEYS, "x264-params": "open-gop=1:scenecut=0"}, None, "libx264"),
    "from_123_s.mp4": (KEYS, [123_390 + 40 * i for i in range(N)], "libx264"),
    "variable_rate.mp4": (videos.LONG_GOP, [40 * i + i * i // 2 for i in range(N)], "libx264"),
    "no_times.h264": (KEYS, None, "libx264"),
    "b_frames.avi": ({"g": "30", "bf": "2"}, None, "mpeg4"),
}
DELAY = 4  # frames that a decoder gives late, for B-frames


def read(path: Path, wanted: list[int]) -> tuple[list[int], VideoFile, int]:
    """(what the frames say, the file, how many frames it said to have)."""
    file, said = VideoFile(path), []
    found = list(file.read(lambda num_frames: (said.append(num_frames), wanted)[1]))
    assert [number for number, _ in found] == sorted(set(wanted))
    return [videos.number(image) for _, image in found], file, said[0]


@pytest.mark.parametrize("name", FILES)
def test_the_frames_that_were_asked_for(name, tmp_path):
    options, times, codec = FILES[name]
    path = videos.write(tmp_path / name, N, options, times, codec)
    gop = 250 if options is videos.LONG_GOP or name == "no_times.h264" else 30
    for wanted in ([0, 1, 5], [64, 61, 64, 77], [N - 1]):
        numbers, file, num_frames = read(path, wanted)
        assert numbers == sorted(set(wanted))
        assert num_frames == N
        first = max(0, (min(wanted) // gop) * gop - DELAY) if gop < N else 0
        assert len(numbers) <= file.num_decoded <= max(wanted) - first + 1 + DELAY


def test_a_large_file_is_read_again_instead_of_kept(tmp_path, monkeypatch):
    path = videos.write(tmp_path / "v.mp4", N, KEYS)
    monkeypatch.setattr("recipes.kinetics.video.frames._MOST_KEPT", 0)
    numbers, file, _ = read(path, [70, 80])
    assert numbers == [70, 80]
    assert file.num_decoded <= 81 - 60 + DELAY


def test_files_that_are_no_videos_say_what_they_are(tmp_path):
    whole = videos.write(tmp_path / "whole.mp4", 30, KEYS).read_bytes()
    for content, message in (
        (whole[:-100], "cut short: box moov at byte "),
        (whole[:500], "cut short: box mdat at byte "),
    ):
        (tmp_path / "bad.mp4").write_bytes(content)
        with pytest.raises(BadRecord, match=message):
            read(tmp_path / "bad.mp4", [0])
    with pytest.raises(BadRecord, match="not found"):
        read(tmp_path / "none.mp4", [0])


def test_a_folder_of_images_with_a_gap(tmp_path):
    for i in range(20):
        if i != 16:
            cv2.imwrite(str(tmp_path / f"img_{i + 1:05d}.jpg"), videos.picture(i))
    folder = FrameFolder(tmp_path, 20)
    found = list(folder.read(lambda _n: [3, 19, 3]))
    assert [(n, videos.number(image)) for n, image in found] == [(3, 3), (19, 19)]
    with pytest.raises(BadRecord, match=r"img_00017\.jpg: not found; the list says 20 frames"):
        list(folder.read(range))
    (tmp_path / "img_00002.jpg").write_bytes(b"no image")
    with pytest.raises(BadRecord, match=r"img_00002\.jpg: no image that OpenCV can read"):
        list(folder.read(lambda _n: [1]))


def test_colours_are_red_green_blue(tmp_path):
    image = np.zeros((32, 32, 3), np.uint8)
    image[..., 2] = 250  # OpenCV writes blue, green, red
    cv2.imwrite(str(tmp_path / "img_00001.jpg"), image)
    ((_, found),) = FrameFolder(tmp_path, 1).read(lambda _n: [0])
    assert found[0, 0].tolist()[0] > 240
    assert found[0, 0].tolist()[2] < 10


def test_without_pyav_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match="PyAV, which is not installed: `pip install"):
        runpy.run_path(frames.__file__)
