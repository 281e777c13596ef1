"""Fine-tuning in recipe `face`: a moving average of the weights, adapters, a teacher; their flags and checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from partial_fc.errors import install
from partial_fc.flags import check_numbers, flag, is_given
from partial_fc.flags.facts import In, MayChange, Refused

if TYPE_CHECKING:
    from partial_fc.train.backbone import TorchBackbone
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
    """With --teacher: execute the FILE.py beside it that builds its network."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("teacher_weight", "trust_code"):
            if is_given(self, name) and self.teacher is None:
                raise ValueError(f"{flag(name)} requires --teacher")
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


def notes(tuning: TuningFlags, total_steps: int) -> Iterator[str]:
    """Yields a note on an average that is slower than the run."""
    if tuning.ema and (left := tuning.ema**total_steps) > 0.05:
        yield f"--ema {tuning.ema:g}: after {total_steps} steps {left:.0%} of it is still the start (docs/encoders.md)"
