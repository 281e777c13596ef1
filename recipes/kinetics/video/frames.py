"""The frames of a video by number, counted from 0 in presentation order: a folder of images, or a video file through
PyAV. `read` opens files and closes them when done."""

import itertools
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.decode import decode
from partial_fc.data.sample import MAX_FILE_BYTES, BadRecord
from partial_fc.errors import install
from partial_fc.file_kind import TEXT, it_is, kind_of_file
from partial_fc.files import read_bytes, regular

try:
    import av
    from av.container import InputContainer
    from av.error import FFmpegError
    from av.video.stream import VideoStream
except ModuleNotFoundError as error:
    raise ValueError(f"videos are read with PyAV, which is not installed: `{install('video')}`") from error

# Number of frames -> the wanted numbers, which may repeat.
Choose = Callable[[int], Sequence[int]]
Pixels = NDArray[np.uint8]
_IMAGE = "img_{:05d}.jpg"
_FRAME_PIXELS = 1 << 24
_MOST_KEPT = 64 << 20  # bytes of a file whose packets are kept in memory between the two passes


class FrameFolder:
    """Images img_00001.jpg, img_00002.jpg, ... of a folder; the list gives their number."""

    def __init__(self, path: Path, num_frames: int):
        self.path, self.num_frames = path, num_frames
        self.num_decoded = 0

    def read(self, choose: Choose) -> Generator[tuple[int, Pixels]]:
        for number in sorted(set(choose(self.num_frames))):
            name = _IMAGE.format(number + 1)
            try:
                image = decode(read_bytes(self.path / name, MAX_FILE_BYTES))
            except FileNotFoundError:
                raise BadRecord(f"{name}: not found; {self._there()}") from None
            except (OSError, BadRecord) as error:
                raise BadRecord(f"{name}: {error}") from None
            self.num_decoded += 1
            yield number, image

    def _there(self) -> str:
        if not self.path.is_dir():
            return "its folder is not there"
        names = sorted(entry.name for entry in os.scandir(self.path))
        frames = [name for name in names if re.fullmatch(r"img_\d{5}\.jpg", name)]
        others = f"files are named as {names[0]!r}" if names else "the folder is empty"
        return f"the list says {self.num_frames} frames, the folder has {len(frames)}" if frames else others


class _Index(NamedTuple):
    """The packets of a stream. num_frames: shown ones. number_of: presentation time -> frame number; empty if the
    container has no times. keys: (time, packet index) of the key frames."""

    num_frames: int
    number_of: dict[int, int] | None
    keys: list[tuple[int, int]]

    def start(self, wanted: int) -> int:
        """Returns the packet at which decoding begins for this frame."""
        if self.number_of is None:
            return 0
        time = next(time for time, number in self.number_of.items() if number == wanted)
        return max((key for key in self.keys if key[0] <= time), default=(0, 0))[1]


class VideoFile:
    """A video file, of any kind that FFmpeg reads.

    Frames are numbered by the presentation times of all packets, which are read without decoding: time x rate would be
    wrong for a variable rate. Decoding starts at the last key frame before the first wanted frame and ends with the
    last wanted one; only wanted frames become RGB. The decoder has no threads: the loader has them.
    """

    def __init__(self, path: Path):
        self.path = path
        # Totals of all reads: they measure how few frames are decoded in vain.
        self.num_decoded = 0

    def read(self, choose: Choose) -> Generator[tuple[int, Pixels]]:
        """Yields (number, uint8 (H, W, 3) RGB) of the frames that choose(number of frames) names, each once, ascending.
        Raises BadRecord for a file that is no video, cut short, or damaged at these frames."""
        try:
            _check_length(self.path)
            with av.open(os.fspath(self.path)) as container:
                stream = _video_stream(container)
                yield from self._read(container, stream, choose)
        except FileNotFoundError:
            raise BadRecord("not found") from None
        except (FFmpegError, OSError) as error:
            kind = "; it is text" if kind_of_file(self.path) == TEXT else it_is(self.path)
            kind = kind.replace("it is a video", "it begins as a video: damaged or cut short")
            raise BadRecord(f"no video that FFmpeg can read: {error.strerror or error}{kind}") from None
        except UnicodeDecodeError as error:  # a title, or another text in it
            raise BadRecord(f"no video that PyAV can read: {error}") from None

    def _read(self, container: InputContainer, stream: VideoStream, choose: Choose) -> Iterator[tuple[int, Pixels]]:
        keep = container.size <= _MOST_KEPT
        packets, seen = [], []
        for packet in container.demux(stream):
            if packet.size:
                seen.append((packet.pts, packet.is_keyframe, packet.is_discard))
                if packet.is_corrupt:
                    raise BadRecord(f"packet {len(seen)} is damaged or cut short")
                if keep:
                    packets.append(packet)
        index = _index(seen)
        if not index.num_frames:
            raise BadRecord("no frames in it")
        wanted = sorted(set(choose(index.num_frames)))
        start = index.start(wanted[0])
        if keep:
            yield from self._decode(stream, packets[start:], index, wanted)
            return
        with av.open(os.fspath(self.path)) as again:
            stream = _video_stream(again)
            after = itertools.islice((packet for packet in again.demux(stream) if packet.size), start, None)
            yield from self._decode(stream, after, index, wanted)

    def _decode(
        self, stream: VideoStream, packets: Iterable[av.Packet], index: _Index, wanted: list[int]
    ) -> Iterator[tuple[int, Pixels]]:
        left = iter(wanted)
        looking_for = next(left)
        _check_pixels(stream.codec_context.width, stream.codec_context.height)
        for counted, frame in enumerate(_frames(stream.codec_context, packets)):
            self.num_decoded += 1
            _check_pixels(frame.width, frame.height)
            number = counted
            if index.number_of is not None:
                number = -1 if frame.pts is None else index.number_of.get(frame.pts, -1)
            if number < looking_for:
                continue
            if number > looking_for or frame.is_corrupt:
                break
            yield number, np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)
            looking_for = next(left, -1)
            if looking_for < 0:
                return
        raise BadRecord(f"frame {looking_for} (from 0) cannot be decoded")


def _check_pixels(width: int, height: int) -> None:
    if width * height > _FRAME_PIXELS:
        raise BadRecord(f"frames of {width} x {height} pixels; expected at most {_FRAME_PIXELS:,} in all")


def _video_stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise BadRecord("no video stream in it")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise BadRecord("a video stream of a kind that FFmpeg cannot decode")
    stream.codec_context.thread_count = 1
    return stream


def _frames(codec: av.VideoCodecContext, packets: Iterable[av.Packet]) -> Iterator[av.VideoFrame]:
    for packet in packets:
        yield from codec.decode(packet)
    yield from codec.decode(None)


def _index(seen: list[tuple[int | None, bool, bool]]) -> _Index:
    """Builds the index. seen: (time, is a key frame, is hidden before an edited file's beginning) of each packet."""
    shown = [time for time, _, hidden in seen if not hidden]
    if None in shown:
        return _Index(len(shown), None, [])
    times = sorted({time for time in shown if time is not None})
    keys = [(time, i) for i, (time, is_key, _) in enumerate(seen) if is_key and time is not None]
    return _Index(len(times), {time: number for number, time in enumerate(times)}, keys)


def _check_length(path: Path) -> None:
    """Raises BadRecord for an MP4 or MOV whose last box exceeds the file: FFmpeg would read what there is. And for one
    without the box that recorders write last."""
    size, kinds = path.stat().st_size, set[bytes]()
    with open(path, "rb", opener=regular) as file:
        at = 0
        while at + 8 <= size:
            file.seek(at)
            head = file.read(16)
            length, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if at == 0 and kind not in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
                return
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            if length == 0:  # up to the end of the file
                return
            if length < 8 or at + length > size:
                raise BadRecord(
                    f"{'damaged' if length < 8 else 'cut short'}: box {kind.decode('latin-1')} at byte {at:,} says "
                    f"{length:,} bytes; the file has {size:,} in all"
                )
            kinds.add(kind)
            at += length
    if kinds and not kinds & {b"moov", b"meta"}:  # a picture (HEIC, AVIF) has the latter
        raise BadRecord("no moov box, which a recorder writes last: its recording has not ended")
