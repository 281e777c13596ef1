"""The flags of a last layer with class centres: what may go together, and PartialFC made of them.

The head is imported when the flags are known to be right: torch takes seconds, which --help does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from partial_fc.flags.by_step import ByStep, parse
from partial_fc.flags.facts import ANY, In, Kept, MayChange, Refused, Values, check_numbers, flag
from partial_fc.flags.launch import LaunchFlags
from partial_fc.flags.training import NO_CHECKPOINT, OptimFlags, ScheduleFlags, is_given

if TYPE_CHECKING:
    import torch

    from partial_fc.comm import World
    from partial_fc.head import Margin, PartialFC, Rule, Steps, Storage
    from partial_fc.head.rows import RowOptimizer
    from partial_fc.train.precision import Mode, Precision

Loss = Literal[
    "cosface", "arcface", "arcface-straight-through", "softmax", "sphereface", "adaface", "curricularface", "combined"
]


def _moved_by(values: Values) -> str:
    """What moves the class centres."""
    name = values.get("head_optimizer", "same")
    name = values.get("optimizer") if name == "same" else name
    return "sgd" if name == "nesterov" else str(name)  # their state is the same


_OTHER_STATE = Refused("its state is of no use to another one", lambda then, now: _moved_by(then) != _moved_by(now))


@dataclass(frozen=True, kw_only=True)
class HeadFlags:
    """The loss, the class centres, and how they are sampled, stored and moved."""

    loss: Loss = "cosface"
    """arcface-straight-through: the margin without its slope, as arcface_torch has it. combined: see --margins.
    sphereface, adaface, curricularface: with the margins that were published with them."""
    scale: Annotated[float, In("(0, inf)")] = 64.0
    """What cosines are multiplied by."""
    margins: Annotated[tuple[float, float, float] | None, In(ANY)] = None
    """For `combined`: m1 m2 m3 of cos(m1 * angle + m2) - m3. (arcface is 1 0.5 0, cosface 1 0 0.4.)"""
    margin_schedule: str | None = None
    """The margin m of --loss by step: '0:0.0 10%:0.2 30%:0.4' begins without one, has 0.2 after a tenth of all steps
    and 0.4 after three. Numbers without % are steps. Not for softmax and combined."""
    sub_centres: Annotated[int, In("[1, 65536]"), Refused("the class centres do not fit")] = 1
    """Centres of each class; the nearest counts. More than one make room for classes with wrong images among theirs."""
    interclass_filtering_threshold: Annotated[float, In("[0, 1)")] = 0.0
    """A class that is not an image's target and has a larger cosine than this is left out of that image's softmax: it
    may be the same person under another number. 0: none is."""
    label_smoothing: Annotated[float, In("[0, 1)")] = 0.0
    """Share of the target that is spread evenly over the active classes."""
    rule: Literal["mean-softmax", "own-out", "soft-target", "mlc", "mlcd"] = "mean-softmax"
    """The loss of an image with several labels (docs/many-labels.md). mean-softmax: the mean of the losses with each
    alone. own-out: the same, its other labels no negatives. soft-target: cross-entropy with all as the target. mlc:
    each above every other class. mlcd: labels and other classes apart; it is another loss with one label, too."""
    sample_rate: Annotated[float, In("(0, 1]")] = 1.0
    """Share of all class centres that are negatives in a step, 0 < rate <= 1. Worth it from millions of classes on."""
    sample_rate_schedule: str | None = None
    """The rate by step, instead of --sample-rate: '0:0.3 60%:0.5 90%:1.0' is 0.3 from the first step on, 0.5 after 60 %
    of all steps, and all classes in the last tenth. Numbers without % are steps."""
    quota: Literal["negatives", "insightface"] = "negatives"
    """What --sample-rate is the share of. negatives: of them alone; the classes of the batch come on top. insightface:
    of all that take part, the classes of the batch among them, as arcface_torch counts."""
    sampling_correction: bool = False
    """Divides the sampled negatives' part of the softmax by the sample rate: the loss then estimates that over all
    classes."""
    hard_negatives: int = 0
    """Besides the sampled negatives, of each process: so many of its centres, the nearest known ones, for each class
    of the batch."""
    hard_negatives_every: Annotated[int, In(1)] = 10
    """Steps from one search for nearer centres, among the active ones, to the next. One takes about a third of the
    arithmetic of the head's step."""
    head_impl: Annotated[Literal["auto", "plain", "cpu", "triton"], MayChange] = "auto"
    """What computes the last layer. auto: the Triton kernels on a GPU, the C++ kernel on a CPU, plain PyTorch for
    --precision fp64."""
    start_centres: Annotated[str | None, tyro.conf.arg(aliases=["--head-centres"]), MayChange] = None
    """Class centres to start from, their optimizer anew. imprint: each class's mean embedding, by the backbone as it
    starts. FILE.npy: a matrix with a row for each class. Or a run or checkpoint, or the centre files of arcface_torch
    or InsightFace's trainer of 2020 (a file or their folder). none: random."""
    imprint_images: Annotated[int, In(1), MayChange] = 16
    """For --start-centres imprint: the most images of a class to embed, its first ones in the data."""
    centre_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How the class centres are stored; bf16 is rounded stochastically, so that small updates add up."""
    centre_state_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """How the optimizer's state of the centres is stored, where it is as wide as they are."""
    centre_place: Annotated[Literal["device", "host", "disk"], MayChange] = "device"
    """Where the centres and their state lie: in the memory of the device that computes, in the host's, or in files."""
    centre_path: Annotated[Path | None, MayChange] = None
    """For --centre-place disk: a folder on a fast local disk, with a sub-folder for each process."""
    head_optimizer: Annotated[Literal["same", "sgd", "nesterov", "adamw", "adagrad", "adam"], _OTHER_STATE] = "same"
    """What moves the centres that were active in a step. same: as --optimizer. adagrad and adam are row-wise: one
    number for a centre instead of one for each of its values (adam: for the second moment)."""
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
    telemetry_every: Annotated[int, MayChange] = 500
    """Steps between two looks at the head's rows, for TensorBoard: rows never touched, their ages, cosines and
    lengths, classes that look like one identity; 0: never."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.margins is not None and self.margins[0] <= 0:
            raise ValueError(f"--margins {self.margins[0]} ...: m1 multiplies the angle; expected more than 0")
        if self.loss == "combined" and self.margins is None:
            raise ValueError("--loss combined needs --margins m1 m2 m3")
        if self.loss != "combined" and self.margins is not None:
            raise ValueError(f"--margins go with --loss combined; --loss {self.loss} has its own: add --margins None")
        if self.margin_schedule is not None and self.loss in ("softmax", "combined"):
            has = "no margin" if self.loss == "softmax" else "three numbers, --margins"
            raise ValueError(
                f"--margin-schedule {self.margin_schedule!r} with --loss {self.loss}, which has {has}; expected a loss "
                "with one margin, such as cosface or arcface"
            )
        if self.sample_rate_schedule is not None and self.sample_rate != 1.0:
            raise ValueError(
                f"--sample-rate {self.sample_rate} and --sample-rate-schedule {self.sample_rate_schedule!r} both say "
                "what is sampled; give one of them (--sample-rate 1 where a file or preset has another)"
            )
        _ = self.margin_by_step, self.rate_by_step  # which check themselves
        if (self.centre_place == "disk") != (self.centre_path is not None):
            raise ValueError("--centre-place disk and --centre-path DIR go together: give both, or none")
        if self.centre_path is not None and self.centre_path.exists() and not self.centre_path.is_dir():
            raise ValueError(f"--centre-path {self.centre_path} is a file; expected a folder")
        if is_given(self, "imprint_images") and self.start_centres != "imprint":
            raise ValueError(f"--imprint-images {self.imprint_images} goes with --start-centres imprint")
        if is_given(self, "hard_negatives_every") and not self.hard_negatives:
            raise ValueError(
                "--hard-negatives-every without --hard-negatives: there is nothing to search for; give both, or none"
            )

    def check(
        self, launch: LaunchFlags, optim: OptimFlags, schedule: ScheduleFlags, resume: str, num_labels: int = 1
    ) -> None:
        """Raises ValueError for flags that do not go together, in the head itself or with those of other groups.
        num_labels: of an image, in a step."""
        import torch

        from partial_fc.head.options import check_options, check_several_labels
        from partial_fc.head.rows import RowAdagrad, RowAdamW

        check_options(
            [self._margin(*value) for value in self._margin_values],
            self._rates,
            hard_negatives=self.hard_negatives > 0,
            quota=self.quota,
            spell=flag,
            **self._softmax_options(),
        )
        if num_labels > 1 or not self._rule().one_label_is_softmax:
            what = f"{num_labels} labels an image" if num_labels > 1 else f"--rule {self.rule}"
            check_several_labels(self._margin(), self.label_smoothing, what, flag)
        elif is_given(self, "rule"):
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
        if optim.accumulate > 1 and self.loss in ("adaface", "curricularface"):
            raise ValueError(
                f"--accumulate {optim.accumulate} with --loss {self.loss}: this loss keeps averages over whole "
                "batches, and micro-batches would give it others; use another loss, or a larger --batch-size"
            )
        row_optimizer = self._row_optimizer(optim)  # which checks itself
        if isinstance(row_optimizer, RowAdagrad) and self.centre_state_dtype != "same":
            raise ValueError(
                f"--centre-state-dtype {self.centre_state_dtype} with --head-optimizer adagrad: its state is one "
                "number a centre, always fp32; leave --centre-state-dtype out"
            )
        if isinstance(row_optimizer, RowAdamW) and self._state_dtype == torch.float16:
            raise ValueError(
                "AdamW with its state in fp16: squares of gradients are below what fp16 holds, and centres are thrown "
                "far away; add --centre-state-dtype bf16 or fp32, or --head-optimizer adam"
            )

    def notes(self, optim: OptimFlags, head: PartialFC) -> Iterator[str]:
        """What was asked for and makes no difference here, or costs more than one may know."""
        import torch

        from partial_fc.data.check import advice
        from partial_fc.head.kernels import auto_precision

        if self.centre_place == "host" and head.store.device == torch.device("cpu"):
            yield "--centre-place host: the device that computes is the CPU, whose memory is the host's"
        if optim.precision in ("bf16", "fp16", "fp16-o2") and self.head_impl == "plain":
            yield "--head-impl plain multiplies fp32 numbers, whatever --precision says"
        elif head.kernel.precision == "bf16" and auto_precision(head.kernel.name, head.store.device) == "fp32":
            yield "--precision bf16: the head only rounds to it and multiplies fp32 numbers here; auto does not round"
        if optim.accumulate > 1 and self.hard_negatives:
            yield "--hard-negatives with --accumulate: a class of several micro-batches keeps the list of the last"
        if self.quota == "insightface" and min(self._rates) == 1.0:
            yield "--quota insightface: without sampling every class takes part in every step"
        if self.head_catch_up == "none":
            if min(self._rates) == 1.0:
                yield "--head-catch-up none: without sampling every centre is active in every step and none rests"
            elif not head.optimizer.moves_without_gradient:
                yield f"--head-catch-up none: {head.optimizer} leaves centres alone that are not active in any case"
            elif head.optimizer.has_momentum:
                yield advice.of_resting_centres()

    # ---- the head

    def build(
        self,
        num_classes: int,
        embedding_size: int,
        world: World,
        precision: Precision,
        optim: OptimFlags,
        seed: int,
        ignore_index: int | None = None,
        total_steps: int = 0,
        name: str = "",
    ) -> PartialFC:
        """With --precision fp64, for checks, centres are stored so, too. ignore_index: what fills the rows of a batch
        with several labels; None: nothing, and no wait for the device to look for it. total_steps: of the run, for
        margins and rates by step. name: of a head that is one of several; its centres and negatives are drawn
        otherwise than another's."""
        from partial_fc.counter_rng import derive_key
        from partial_fc.head import HardNegatives, PartialFC

        if self.head_weight != 1 and not name:
            raise ValueError(f"--head-weight {self.head_weight}: there is one head; give --lr or --head-lr")
        seed = derive_key(seed, *name.encode()) if name else seed
        device, dtype = precision.device, precision.parameter_dtype
        hard_negatives = None
        if self.hard_negatives:
            hard_negatives = HardNegatives(num_classes, self.hard_negatives, self.hard_negatives_every, device=device)
        return PartialFC(
            num_classes,
            embedding_size,
            *self.margin_and_rate(total_steps),
            world,
            seed,
            self._row_optimizer(optim),
            device,
            dtype,
            impl=self.head_impl,
            precision=_operands(precision.mode, optim.precision),
            storage=self._storage(dtype, name),
            catch_up=self.head_catch_up,
            hard_negatives=hard_negatives,
            quota=self.quota,
            ignore_index=ignore_index,
            rule=self._rule(),
            name=name,
            **self._softmax_options(),
        )

    @property
    def margin_by_step(self) -> ByStep | None:
        """Returns --margin-schedule, if it is given."""
        allowed = {"sphereface": "[1, inf)", "adaface": "[0, inf)", "curricularface": "[0, 1.5707963]"}
        given = self.margin_schedule
        return None if given is None else parse("--margin-schedule", given, allowed.get(self.loss, ANY))

    @property
    def rate_by_step(self) -> ByStep | None:
        """Returns --sample-rate-schedule, if it is given."""
        given = self.sample_rate_schedule
        return None if given is None else parse("--sample-rate-schedule", given, "(0, 1]")

    def margin_and_rate(
        self, total_steps: int, shift: float = 0.0
    ) -> tuple[Margin | Steps[Margin], float | Steps[float]]:
        """Returns margin and sample rate, for PartialFC. total_steps, shift: of the run (`ByStep.steps`)."""
        from partial_fc.head import Steps

        margin: Margin | Steps[Margin] = self._margin()
        rate: float | Steps[float] = self.sample_rate
        if margins := self.margin_by_step:
            margin = Steps({step: self._margin(m) for step, m in margins.steps(total_steps, shift).items()})
        if rates := self.rate_by_step:
            rate = Steps(rates.steps(total_steps, shift))
        return margin, rate

    @property
    def _rates(self) -> list[float]:
        """The sample rates of the run."""
        by_step = self.rate_by_step
        return [entry.value for entry in by_step.entries] if by_step else [self.sample_rate]

    @property
    def _margin_values(self) -> list[tuple[float, ...]]:
        """The margins of the run; (): that of the loss."""
        by_step = self.margin_by_step
        return [(entry.value,) for entry in by_step.entries] if by_step else [()]

    def settings(self, lr: float) -> dict[str, Any]:
        """What the training loop is to know: of train.job.Settings. lr: of --lr."""
        ratio = 1.0 if self.head_lr is None else self.head_lr / lr
        return {"head_clip": self.head_clip, "head_lr_ratio": ratio, "telemetry_every": self.telemetry_every}

    def _softmax_options(self) -> dict[str, Any]:
        """Which classes count in the softmax, and how much: options of PartialFC."""
        return {
            "interclass_filtering_threshold": self.interclass_filtering_threshold or None,
            "sub_centres": self.sub_centres,
            "label_smoothing": self.label_smoothing,
            "sampling_correction": self.sampling_correction,
        }

    def _rule(self) -> Rule:
        from partial_fc import head

        rules = (head.MeanSoftmax(), head.OwnOut(), head.SoftTarget(), head.MLC(), head.MLCD())
        return dict(zip(("mean-softmax", "own-out", "soft-target", "mlc", "mlcd"), rules, strict=True))[self.rule]

    def _margin(self, *value: float) -> Margin:
        """Returns the margin of --loss, with this value of m."""
        from partial_fc import head

        if self.loss == "combined":
            assert self.margins is not None
            return head.CombinedMargin(self.scale, *self.margins)
        margins: dict[str, Callable[..., Margin]] = {
            "cosface": head.CosFace,
            "arcface": head.ArcFace,
            "arcface-straight-through": partial(head.ArcFace, straight_through=True),
            "softmax": head.Softmax,
            "sphereface": head.SphereFace,
            "adaface": head.AdaFace,
            "curricularface": head.CurricularFace,
        }
        return margins[self.loss](self.scale, *value)

    def _row_optimizer(self, optim: OptimFlags) -> RowOptimizer:
        from partial_fc.head.rows import RowAdagrad, RowAdam, RowAdamW, RowSGD

        name = optim.optimizer if self.head_optimizer == "same" else self.head_optimizer
        decay = optim.weight_decay if self.head_weight_decay is None else self.head_weight_decay
        match name:
            case "sgd" | "nesterov":
                return RowSGD(optim.momentum, decay, nesterov=name == "nesterov")
            case "adamw" | "muon":
                return RowAdamW(weight_decay=decay)
            case "adam":
                return RowAdam(weight_decay=decay)
        return RowAdagrad(weight_decay=decay)

    @property
    def _state_dtype(self) -> torch.dtype:
        return _dtype(self.centre_dtype if self.centre_state_dtype == "same" else self.centre_state_dtype)

    def _storage(self, dtype: torch.dtype, name: str) -> Storage:
        import torch

        from partial_fc.head import Storage

        path = self.centre_path / name if self.centre_path else None
        if dtype == torch.float64:
            return Storage(dtype, None, self.centre_place, path)
        return Storage(_dtype(self.centre_dtype), self._state_dtype, self.centre_place, path)


def _operands(mode: Mode, asked: str) -> Literal["auto", "fp32", "bf16"]:
    """Of the head's products. It has none of fp16 numbers: then, and with --precision auto, bf16 where its kernel
    multiplies such numbers on this hardware."""
    if mode in ("fp32", "fp64"):
        return "fp32"
    return "bf16" if asked == "bf16" else "auto"


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
