"""How the log of recipe face looks: ours, or to the letter that of InsightFace's MXNet trainer, for what reads it.

    rank-id:0:2026-11-22 21:40:05,123-Iter:20 Rank:391.20 it/sec Total:782.41 it/sec [0][loss]:43.12
    rank-id:0:2026-11-22 21:52:31,456-[lfw][2000]XNorm: 21.372115
    rank-id:0:2026-11-22 21:52:31,456-[lfw][2000]Accuracy-Flip: 0.99517+-0.00369
    rank-id:0:2026-11-22 21:52:31,456-[lfw][2000]Accuracy-Highest: 0.99517

(set_logger in recognition/partial_fc/mxnet/train_memory.py, CallBackLogging and CallBackVertification in callbacks.py.)
Its "it" are images; the loss is the mean since the line before; the number before it is that of finished epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from partial_fc.evaluate import Verifications
from partial_fc.train.log import Interval, StepLine


class IterLine(StepLine):
    """Theirs, which ends with a space; none after the last step, unless it is due."""

    def due(self, step: int, position: int) -> bool:
        return step % self.frequent == 0

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        return (
            f"Iter:{step} Rank:{since.images_per_s_per_rank:.2f} it/sec Total:{since.images_per_s:.2f} it/sec "
            f"[{position // self.num_samples}][loss]:{since.mean_loss:.2f} "
        )


class FlipVerifications(Verifications):
    """Verification with their three lines a set."""

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        found = []
        for name in (one.name for one in self.sets):
            accuracy, std = values[f"{name}/accuracy"], values[f"{name}/accuracy_std"]
            found += [
                f"[{name}][{step}]XNorm: {values[f'{name}/xnorm']:f}",
                f"[{name}][{step}]Accuracy-Flip: {accuracy:1.5f}+-{std:1.5f}",
                f"[{name}][{step}]Accuracy-Highest: {best[name]:1.5f}",
            ]
        return found


@dataclass(frozen=True)
class LogStyle:
    """What a value of --log-style stands for. hist: see `log.open_files`; {rank} in it is the rank."""

    hist: str | None
    line: type[StepLine]
    verifications: type[Verifications]


STYLES = {
    "own": LogStyle(None, StepLine, Verifications),
    "insightface-mxnet": LogStyle("rank-id:{rank}:%(asctime)s-%(message)s", IterLine, FlipVerifications),
}
