"""The log lines of recipe face, in formats that parsers for InsightFace know.

The files have arcface_torch's lines, with additions at the end of each speed line, and a line of ours for each
evaluation:

    Speed 2411.31 samples/sec   Loss 12.3456   LearningRate 0.100000   Epoch: 0   Global Step: 100   Required: 2 hours
    [lfw][2000]XNorm: 21.372115
    [lfw][2000]Accuracy-Flip: 0.99517+-0.00369
    [lfw][2000]Accuracy-Highest: 0.99517

training.log, arcface_torch's file, has them with "Training: " and the time before them. "Fp16 Grad Scale" is there if
there is a loss scale; the loss is the mean since the line before. The terminal has shorter lines of ours. (Formats:
init_logging in utils/utils_logging.py, CallBackLogging and CallBackVerification in utils/utils_callbacks.py, of
recognition/arcface_torch.)
"""

import math
from collections.abc import Mapping

from partial_fc.evaluate.verification import Verifications
from partial_fc.train.record.log import Interval, Line, StepLine


class SpeedLine(StepLine):
    """arcface_torch's line, followed by additions."""

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        scale = "" if since.loss_scale is None else f"Fp16 Grad Scale: {since.loss_scale:2.0f}   "
        epoch = position / self.num_samples
        more = since.words.partition(", ")[2]  # after the speed of all ranks
        text = (
            f"Speed {since.samples_per_s:.2f} samples/sec   Loss {since.mean_loss:.4f}   LearningRate {lr:.6f}   "
            f"Epoch: {int(epoch)}   Global Step: {step}   {scale}Required: {since.seconds_left / 3600:.0f} hours | "
            f"step {step}/{self.total_steps} epoch {epoch:.2f} | {more}"
        )
        return Line(text, self.short(step, since))


class SummedUp(Verifications):
    """arcface_torch's lines, and a summary of all sets; the terminal has a short line a set."""

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        parts, short = [], []
        for name in (one.name for one in self.sets):
            at_far = values[f"{name}/tar@far=1e-3"]
            tar = "" if math.isnan(at_far) else f", TAR at FAR 1e-3 {100 * at_far:.2f} %"  # NaN: too few pairs
            accuracy, highest = f"{100 * values[f'{name}/accuracy']:.2f} %", f"best {100 * best[name]:.2f} %"
            parts.append(f"{name} {accuracy} ({highest}{tar})")
            short.append(f"step {step} · {name} {accuracy} · {highest}")
        summary = [Line(f"verification, step {step}: {', '.join(parts)}", "\n".join(short))] if parts else []
        theirs: list[str] = [Line(line, "") for line in super().lines(step, epoch, values, best)]
        return theirs + summary
