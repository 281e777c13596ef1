"""Fine-tuning in recipe `face`: a moving average of the weights, adapters, a teacher; their flags and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from partial_fc.errors import install
from partial_fc.flags import check_numbers, is_given
from partial_fc.flags.facts import In, MayChange, Refused

if TYPE_CHECKING:
    from partial_fc.data import Source
    from partial_fc.head import PartialFC
    from partial_fc.head.compatible import Compatible
    from partial_fc.train.backbone import TorchBackbone
    from partial_fc.train.job import RunState
    from partial_fc.train.run import Run
    from partial_fc.train.teacher import Teacher

    from .backbone import Network


@dataclass(frozen=True, kw_only=True)
class TuningFlags:
    """Fine-tuning (docs/encoders.md)."""

    ema: Annotated[float, In("[0, 1)")] = 0.0
    """Keep an exponential moving average of the backbone's weights and running statistics with this decay, 0.999 or
    0.9999, say; 0: none. The average is evaluated and delivered as model.safetensors; the weights themselves lie beside
    it, in model-raw.safetensors."""
    lora: Annotated[int, Refused("other parameters are trained")] = 0
    """Train adapters of this rank, by peft, and the last layer instead of the backbone, which is frozen; 0: none. What
    is delivered is the plain network, adapters merged."""
    teacher: Path | None = None
    """Also pull embeddings towards those of this trained model: a run's folder, a checkpoint's, or a file of
    weights (docs/library.md)."""
    teacher_weight: Annotated[float, In("(0, inf)")] = 1.0
    """With --teacher: the loss gets this times the mean of 1 - cosine to the teacher's embedding."""
    trust_code: Annotated[bool, MayChange] = False
    """With --teacher and --compatible-with: execute the FILE.py beside it that builds its network."""
    compatible_with: Annotated[Path | None, Refused("a frozen head is added or left out")] = None
    """Make embeddings that can be searched among those of this older model: its class centres, which stay as they are,
    classify them, too. A run, a checkpoint, or arcface_torch's folder (docs/after-training.md)."""
    compatible_weight: Annotated[float, In("(0, inf)")] = 1.0
    """With --compatible-with: what that loss is multiplied by."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if is_given(self, "teacher_weight") and self.teacher is None:
            raise ValueError("--teacher-weight requires --teacher")
        if is_given(self, "compatible_weight") and self.compatible_with is None:
            raise ValueError("--compatible-weight requires --compatible-with")
        if is_given(self, "trust_code") and self.teacher is None and self.compatible_with is None:
            raise ValueError("--trust-code requires --teacher or --compatible-with")
        if self.lora and find_spec("peft") is None:
            raise ValueError(f"--lora {self.lora} needs peft: `{install('lora')}`")


def teacher(tuning: TuningFlags, network: Network, image_size: int, backbone: TorchBackbone) -> Teacher | None:
    """Loads the teacher. Raises ValueError for one of other images or embeddings."""
    from partial_fc.embedding.load import load
    from partial_fc.models.inputs import Unchanged
    from partial_fc.train.teacher import Teacher

    if tuning.teacher is None:
        return None
    try:
        pixels = None if isinstance(network.to_input, Unchanged) else image_size
        model = load(tuning.teacher, backbone.device, image_size=pixels, trust_code=tuning.trust_code)
        if (type(model.to_input), model.image_size) != (type(network.to_input), image_size):
            raise ValueError(f"{tuning.teacher} takes {model.to_input.description}, not {network.to_input.description}")
    except ValueError as error:
        raise ValueError(f"--teacher: {error}") from error
    if model.embedding_size != network.embedding_size:
        raise ValueError(
            f"--teacher {tuning.teacher}: its embedding has {model.embedding_size} numbers, this run's "
            f"{network.embedding_size}; give --embedding-size {model.embedding_size}"
        )
    dtype = backbone.precision.parameter_dtype  # else --precision fp64 would depend on a batch's shape as fp32 does
    network_of = model.network.to(dtype)
    return Teacher(
        lambda input_B: network_of(model.to_input(input_B.to(backbone.device, non_blocking=True)).to(dtype)),
        tuning.teacher_weight, backbone.world, backbone.precision.autocast,
    )  # fmt: skip


def with_older(
    run: Run, head: PartialFC, network: Network, backbone: TorchBackbone, source: Source
) -> tuple[Compatible, Callable[[RunState], None]]:
    """Returns the head with the centres of --compatible-with beside its own, and what writes them in a run that starts.
    A collective. Raises ValueError, on all ranks, for a model of other images, or wider embeddings."""
    from partial_fc.head.compatible import Compatible
    from partial_fc.models.inputs import Unchanged
    from partial_fc.train import head_from_flags
    from partial_fc.train.begin.compatible import open_older, write_centres

    config, given = run.config, run.config.tuning.compatible_with
    if config.data.apply and source.class_names() is None:
        raise ValueError("--apply with --compatible-with: classes get other numbers; expected names to match them by")
    older = open_older(given, run.world, backbone.device, config.tuning.trust_code)
    of_vectors = [isinstance(one.to_input, Unchanged) for one in (older.model, network)]
    if of_vectors[0] != of_vectors[1] or older.model.embedding_size > head.embedding_size:
        raise ValueError(
            f"--compatible-with {given}: {older.model}; this run has {network.to_input.description}, and embeddings of "
            f"{head.embedding_size} numbers: expected the same kind of input, and at most as many numbers"
        )
    flags = replace(
        config.head, sub_centres=1, hard_negatives=0, start_centres=None, head_optimizer="adagrad",
        head_weight_decay=0.0, head_lr=None, centre_state_dtype="same", head_catch_up="none",
    )  # fmt: skip
    old = head_from_flags.build(
        flags, head.num_classes, older.model.embedding_size, run.world, backbone.precision, config.optim,
        config.run.seed, head.ignore_index, "old",
    )  # fmt: skip
    run.parts.enter_context(old)

    def start(state: RunState) -> None:
        if not state.step:
            write_centres(run, older, old, source, given)

    return Compatible(head, old, config.tuning.compatible_weight), start


def notes(tuning: TuningFlags, total_steps: int) -> Iterator[str]:
    """Yields a note on an average that is slower than the run."""
    if tuning.ema and (left := tuning.ema**total_steps) > 0.05:
        yield f"--ema {tuning.ema:g}: after {total_steps} steps {left:.0%} of it is still the start (docs/encoders.md)"
