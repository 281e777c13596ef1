"""The flags of a last layer with class centres, and what may go together. (train/head_from_flags.py makes PartialFC of
them.)"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from partial_fc.flags.command_line import near
from partial_fc.flags.facts import ANY, In, Kept, MayChange, Refused, Values, check_numbers
from partial_fc.flags.launch import LaunchFlags
from partial_fc.flags.training import NO_CHECKPOINT, OptimFlags, ScheduleFlags, is_given

LOSSES = ("cosface", "arcface", "arcface-straight-through", "softmax", "adaface", "curricularface", "combined")


def _moved_by(values: Values) -> str:
    """What moves the class centres."""
    name = values.get("head_optimizer", "same")
    name = values.get("optimizer") if name == "same" else name
    return "sgd" if name == "nesterov" else str(name)  # their state is the same


_OTHER_STATE = Refused("its state is of no use to another one", lambda then, now: _moved_by(then) != _moved_by(now))


@dataclass(frozen=True, kw_only=True)
class HeadFlags:
    """The loss, the class centres, and how they are sampled, stored and moved."""

    loss: str = "cosface"
    """cosface, arcface, softmax; arcface-straight-through: the margin without its slope, as arcface_torch has it;
    combined: see --margins; adaface, curricularface: with the margins that were published with them; or FILE.py:CLASS,
    a margin of your own, whose code is executed (docs/head.md)."""
    scale: Annotated[float, In("(0, inf)")] = 64.0
    """What cosines are multiplied by."""
    margins: Annotated[tuple[float, float, float] | None, In(ANY)] = None
    """For `combined`: m1 m2 m3 of cos(m1 * angle + m2) - m3. (arcface is 1 0.5 0, cosface 1 0 0.4.) For
    `arcface-straight-through`: 1 m2 0."""
    sub_centres: Annotated[int, In("[1, 65536]"), Refused("the class centres do not fit")] = 1
    """Centres of each class; the nearest counts. More than one make room for classes with wrong images among theirs."""
    interclass_filtering_threshold: Annotated[float, In("[0, 1)")] = 0.0
    """A class that is not an image's target and has a larger cosine than this is left out of that image's softmax: it
    may be the same person under another number. 0: none is."""
    rule: Literal["mean-softmax", "own-out", "soft-target", "mlc", "mlcd"] = "mean-softmax"
    """The loss of an image with several labels (docs/many-labels.md). mean-softmax: the mean of the losses with each
    alone. own-out: the same, its other labels no negatives. soft-target: cross-entropy with all as the target. mlc:
    each above every other class. mlcd: labels and other classes apart; it is another loss with one label, too."""
    sample_rate: Annotated[float, In("(0, 1]")] = 1.0
    """Share of all class centres that are negatives in a step, 0 < rate <= 1. Worth it from millions of classes on."""
    quota: Literal["negatives", "insightface"] = "negatives"
    """What --sample-rate is the share of. negatives: of them alone; the classes of the batch come on top. insightface:
    of all that take part, the classes of the batch among them, as arcface_torch counts."""
    hard_negatives: int = 0
    """Besides the sampled negatives, of each process: so many of its centres, the nearest known ones, for each class
    of the batch. Nearer ones are searched every 10 steps, among the active ones."""
    head_impl: Annotated[Literal["auto", "plain", "cpu", "triton"], MayChange] = "auto"
    """What computes the last layer. auto: the Triton kernels on a GPU, the C++ kernel on a CPU, plain PyTorch for
    --precision fp64."""
    start_centres: Annotated[str | None, tyro.conf.arg(aliases=["--head-centres"]), MayChange] = None
    """Class centres to start from, their optimizer anew. imprint: the mean embedding of each class's first 16 images,
    by the backbone as it starts. FILE.npy: a matrix with a row for each class. Or a run or checkpoint, or the
    centre files of arcface_torch or InsightFace's trainer of 2020 (a file or their folder). none: random."""
    centre_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How the class centres are stored; bf16 is rounded stochastically, so that small updates add up."""
    centre_state_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """How the optimizer's state of the centres is stored, where it is as wide as they are."""
    centre_place: Annotated[Literal["device", "host"], MayChange] = "device"
    """Where the centres and their state lie: in the memory of the device that computes, or in the host's."""
    head_optimizer: Annotated[Literal["same", "sgd", "nesterov", "adamw", "adagrad"], _OTHER_STATE] = "same"
    """What moves the centres that were active in a step. same: as --optimizer. adagrad is row-wise: one number
    for a centre instead of one for each of its values."""
    head_lr: float | None = None
    """Learning rate of the centres; scaled and scheduled like --lr, which it is when not given."""
    head_weight_decay: float | None = None
    """Weight decay of the centres; --weight-decay when not given."""
    head_weight: float = 1.0
    """For one of several heads: what its loss is multiplied by before they are added."""
    head_clip: Annotated[float, In("[0, inf]")] = 0.0
    """Largest norm of the gradient of all centres, inf: any; --clip is then the backbone's alone. 0: see --clip."""
    head_catch_up: Annotated[Literal["exact", "none"], Kept("none")] = "exact"
    """With sampling. exact: before a centre is active again it gets what a dense optimizer does to it meanwhile (decay,
    momentum), as in arcface_torch. none: it rests, as in InsightFace's trainer of 2020, which costs accuracy. A resumed
    run keeps `none`: past learning rates are not known."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.loss_file is None and self.loss not in LOSSES:
            hint = near(self.loss, LOSSES)
            raise ValueError(f"--loss is {self.loss}; expected one of {', '.join(LOSSES)}, or FILE.py:CLASS{hint}")
        if self.margins is not None and self.margins[0] <= 0:
            raise ValueError(f"--margins {self.margins[0]} ...: m1 multiplies the angle; expected more than 0")
        if self.loss == "combined" and self.margins is None:
            raise ValueError("--loss combined needs --margins m1 m2 m3")
        if self.loss == "arcface-straight-through" and self.margins and self.margins[::2] != (1.0, 0.0):
            m1, m2, m3 = self.margins
            raise ValueError(
                f"--margins {m1:g} {m2:g} {m3:g} with --loss arcface-straight-through, whose margin is added to the "
                "angle; expected 1 m2 0"
            )
        if self.loss not in ("combined", "arcface-straight-through") and self.margins is not None:
            raise ValueError(f"--margins go with --loss combined; --loss {self.loss} has its own: add --margins None")

    def check(
        self, launch: LaunchFlags, optim: OptimFlags, schedule: ScheduleFlags, resume: str, num_labels: int = 1
    ) -> None:
        """Raises ValueError for flags that do not go together. num_labels: of an image, in a step."""
        if num_labels == 1 and self.rule != "mlcd" and is_given(self, "rule"):
            raise ValueError(
                f"--rule {self.rule} with one label an image: all rules but mlcd are the same loss then; leave it out, "
                "or give --labels"
            )
        if optim.precision == "fp64" and self.head_impl in ("cpu", "triton"):
            raise ValueError(f"--head-impl {self.head_impl} computes in fp32; --precision fp64 goes with plain")
        if (self.head_impl, launch.device) in (("cpu", "cuda"), ("triton", "cpu")):
            raise ValueError(
                f"--head-impl {self.head_impl} with --device {launch.device}: it does not run there; leave one of the "
                "two out"
            )
        if self.start_centres is not None and resume not in NO_CHECKPOINT:
            raise ValueError(
                f"--start-centres with --resume {resume}: that checkpoint brings its own centres; leave one of the two "
                "out"
            )
        if optim.precision == "fp64" and (self.centre_dtype, self.centre_state_dtype) != ("fp32", "same"):
            raise ValueError("--precision fp64 stores the centres so, too: leave --centre-dtype and its state's out")
        if self.head_lr is not None and not schedule.lr > 0:
            raise ValueError(
                f"--head-lr {self.head_lr} with --lr {schedule.lr}: the centres' rate follows the schedule of --lr, as "
                "a multiple of it; give an --lr above 0"
            )
        self._check_optimizer(optim)

    def _check_optimizer(self, optim: OptimFlags) -> None:
        moved_by = self.moved_by(optim)
        if moved_by == "adagrad" and self.centre_state_dtype != "same":
            raise ValueError(
                f"--centre-state-dtype {self.centre_state_dtype} with --head-optimizer adagrad: its state is one "
                "number a centre, always fp32; leave --centre-state-dtype out"
            )
        if moved_by == "adamw" and self.state_dtype == "fp16":
            raise ValueError(
                "AdamW with its state in fp16: squares of gradients are below what fp16 holds, and centres are thrown "
                "far away; add --centre-state-dtype bf16 or fp32, or --head-optimizer adagrad"
            )

    @property
    def loss_file(self) -> Path | None:
        """Returns the file of --loss FILE.py:CLASS."""
        return Path(self.loss.rpartition(":")[0]) if ".py:" in self.loss else None

    def moved_by(self, optim: OptimFlags) -> str:
        """Returns the name of the optimizer of the centres: sgd, nesterov, adamw or adagrad."""
        name = optim.optimizer if self.head_optimizer == "same" else self.head_optimizer
        return "adamw" if name == "muon" else name  # which is for matrices that are multiplied by

    @property
    def state_dtype(self) -> str:
        """Returns the dtype of the optimizer's state."""
        return self.centre_dtype if self.centre_state_dtype == "same" else self.centre_state_dtype

    def settings(self, lr: float) -> dict[str, Any]:
        """What the training loop is to know: of train.job.Settings. lr: of --lr."""
        ratio = 1.0 if self.head_lr is None else self.head_lr / lr
        return {"head_clip": self.head_clip, "head_lr_ratio": ratio}
