"""The learning rate as a pure function of the step, without state to save or restore.

A step is one update of the parameters; the first one is step 0.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["constant", "step", "polynomial", "cosine", "arcface-torch"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A linear warm-up to `base_lr`, then a curve; w is warmup_steps, t total_steps, s the step:

        s < w         warmup_start + (base_lr - warmup_start) * s / w
        constant      base_lr
        step          base_lr * factor ** (how many of `decay_steps` are <= s), or ** ((s + 1) // decay_every)
        polynomial    base_lr * (1 - (s - w) / (t - w)) ** power
        cosine        base_lr * (1 + cos(pi * (s - w) / (t - w))) / 2
        arcface-torch polynomial, but the very first micro-batch has base_lr; s, w and t count micro-batches, of which
                      an update has the rate of its last one (arcface_torch's PolynomialLRWarmup)

    `decay_steps` count from the start of training, warm-up included, as InsightFace's: its trainer of 2020 numbers
    updates from 1 and decays once num_update > 10, so 10 takes effect at the eleventh update, which is step 10 here.
    `decay_every` (imagenet's stepsize) numbers updates from 1, too, and decays at its multiples: 10 takes effect at the
    tenth update, which is step 9 here. micro_batches: of an update, for arcface-torch.

    Raises ValueError for contradictory values.
    """

    kind: Kind
    base_lr: float
    total_steps: int
    warmup_steps: float = 0
    warmup_start: float = 0.0
    micro_batches: int = 1
    decay_steps: tuple[int, ...] = ()
    decay_every: int = 0
    factor: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"schedule is {self.kind!r}, expected {', '.join(get_args(Kind))}")
        if not (math.isfinite(self.base_lr) and self.base_lr >= 0):
            raise ValueError(f"base_lr is {self.base_lr}, expected 0 or a positive number")
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}, expected 1 or more")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, expected 0 or more and less than total_steps, "
                f"{self.total_steps}: otherwise training ends before the warm-up does"
            )
        if not 0 <= self.warmup_start <= self.base_lr:
            raise ValueError(f"warmup_start is {self.warmup_start}, expected 0 to base_lr, {self.base_lr}")
        if bool(self.decay_steps) + bool(self.decay_every) != (self.kind == "step") or self.decay_every < 0:
            raise ValueError(
                f"schedule is {self.kind!r}, decay_steps {self.decay_steps} and decay_every {self.decay_every}: "
                "decay steps belong to schedule 'step', which needs one or more, or else decay_every"
            )
        if list(self.decay_steps) != sorted(set(self.decay_steps)) or min(self.decay_steps, default=1) < 1:
            raise ValueError(f"decay_steps are {self.decay_steps}, expected positive and strictly increasing")
        first = self.decay_steps[0] if self.decay_steps else self.decay_every - 1
        if self.kind == "step" and first < self.warmup_steps:
            raise ValueError(
                f"the first of decay_steps, {first}, lies inside the warm-up of "
                f"{self.warmup_steps} steps: start later or warm up for less"
            )
        if not 0 < self.factor < 1:
            raise ValueError(f"factor is {self.factor}, expected between 0 and 1")
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"power is {self.power}, expected a positive number")

    def lr(self, step: float) -> float:
        """Returns the rate of update `step`, from 0; total_steps is valid too: the end of the curve."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step is {step}, expected 0 to total_steps, {self.total_steps}")
        if self.kind == "arcface-torch":
            step += 1 - 1 / self.micro_batches
            if not step:
                return self.base_lr
        if step < self.warmup_steps:
            return self.warmup_start + (self.base_lr - self.warmup_start) * step / self.warmup_steps
        if self.kind == "constant":
            return self.base_lr
        if self.decay_every:
            return self.base_lr * self.factor ** ((step + 1) // self.decay_every)
        if self.kind == "step":
            return self.base_lr * self.factor ** sum(decay <= step for decay in self.decay_steps)
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        if self.kind in ("polynomial", "arcface-torch"):
            return self.base_lr * max(0.0, 1 - done) ** self.power
        return self.base_lr * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A schedule for a run whose batch size changed: update s has the rate of the original update s + shift, at which a
    run with the current batch size would have seen as many samples."""

    course: Schedule
    total_steps: int
    shift: float

    def lr(self, step: int) -> float:
        """Returns the rate of update `step`, counted from 0 over the whole training."""
        return self.course.lr(min(step + self.shift, self.course.total_steps))


def continued(course: Schedule, step: int, left: int, shift: float) -> Continued:
    """Continues a schedule after `step` updates, with `left` more to come. shift: by how much `step` falls short of the
    number of updates of the current size that would have seen as many samples. Decay steps still count updates."""
    if course.decay_steps:
        course = replace(course, total_steps=max(course.total_steps, step + left))
        shift = 0.0
    return Continued(course=course, total_steps=step + left, shift=shift)


def linear_scaling(base_lr: float, base_batch: int, global_batch: int) -> tuple[float, str]:
    """Scales the rate by k for k times the batch (Goyal et al., 2017, https://arxiv.org/abs/1706.02677).

    Returns the rate, and a sentence with the arithmetic to print: users forget which batch a rate is for.
    """
    if base_batch < 1 or global_batch < 1:
        raise ValueError(f"base batch {base_batch} and global batch {global_batch} must be 1 or more")
    lr = base_lr * global_batch / base_batch
    return lr, (
        f"learning rate {lr:g} = {base_lr:g} * {global_batch} / {base_batch} "
        f"(given for a batch of {base_batch}; the global batch is {global_batch})"
    )
