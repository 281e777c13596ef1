"""Accuracy of a video classifier that averages several clips of each video.

N videos, S segments of each, V crops of a segment, C classes.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.comm import World
from partial_fc.data.sample import Source, naming
from partial_fc.evaluate.classification import Classification
from partial_fc.evaluate.evaluation import Forward

from .video.transforms import ClipTransform

# Scores are summed as integer multiples of this: integer sums do not depend on order or number of ranks.
_UNIT = 2.0**-32
_LARGEST = 2.0**24  # of an output; S x V of them fit into int64


class VideoViews(Classification):
    """Multi-view testing, such as ten clips with three crops. Reads and computes a segment's crops together; a whole
    video of 30 clips would be 162 MB of pixels. The outputs of the clips of a video are summed, as in GluonCV's
    test_recognizer.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        transform: ClipTransform,
        batch_size: int,
        *,
        num_segments: int = 10,
        three_crop: bool = True,
    ):
        """batch_size: clips in one forward, roughly."""
        self.num_crops = 3 if three_crop else 1
        super().__init__(name, source, lambda *_: np.empty(0), max(1, batch_size // self.num_crops))
        self._clips, self._three_crop = transform, three_crop
        self.num_segments = num_segments
        self.num_items = self.num_samples * num_segments

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields NAME/accuracy and NAME/topK. One collective, of 8 N C bytes. Raises as Classification."""
        num_classes = self.source.num_classes
        sums_NC = torch.zeros(self.num_samples * num_classes + 2, dtype=torch.int64)  # then: NaN or Inf, unusable
        counts, score_NC = sums_NC[-2:], sums_NC[:-2].view(self.num_samples, num_classes)
        for index_B, input_B, _ in self._batches(world, counts):
            # (B, C, V, T, H, W), as Classification moves the last axis to the second place.
            clip_BV = input_B.movedim(1, 2).flatten(0, 1)
            output_BC = forward(clip_BV).double().cpu()
            counts[0] += int((~(output_BC.abs() < _LARGEST)).any(dim=1).sum())
            whole_BC = (output_BC.nan_to_num(0).clamp(-_LARGEST, _LARGEST) / _UNIT).round().long()
            score_NC.index_add_(0, (index_B // self.num_segments).repeat_interleave(self.num_crops), whole_BC)
        sums_NC = world.all_reduce(sums_NC, name=f"evaluate/{self.name}/scores")
        self._check(sums_NC)
        yield from self._measure(sums_NC[:-2].view(self.num_samples, num_classes))

    def _measure(self, score_NC: torch.Tensor) -> Iterator[tuple[str, float]]:
        label_N = torch.tensor([self.source.read(index).label for index in range(self.num_samples)])
        mean_NC = score_NC.double() * (_UNIT / (self.num_segments * self.num_crops))
        wrong_N = mean_NC.max(1).indices != label_N
        self.num_correct = int((~wrong_N).sum())
        among_top = (score_NC.topk(self.top).indices == label_N[:, None]).any(dim=1)
        yield f"{self.name}/accuracy", self.num_correct / self.num_samples
        yield f"{self.name}/top{self.top}", int(among_top.sum()) / self.num_samples

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        clips = f"{self.num_segments} x {self.num_crops} clips a video"
        return [f"{line}, {clips}" for line in super().lines(step, epoch, values, best)]

    def _load(self, index: int) -> tuple[NDArray, int]:
        video, segment = divmod(index, self.num_segments)
        sample = self.source.read(video)
        with naming(self.source, video):
            return self._clips.views(sample, segment, self.num_segments, self._three_crop), sample.label
