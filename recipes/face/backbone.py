"""The backbone of recipe `face`: its flags, their checks, and the network.

torch and the networks are imported after the flags are checked: they take seconds, which --help avoids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from partial_fc.errors import install
from partial_fc.flags import OptimFlags, ScheduleFlags, check_numbers, flag, is_given, near
from partial_fc.flags.facts import Basic, In, MayChange

from .insightface import ELSEWHERE

if TYPE_CHECKING:
    from torch import nn

    from partial_fc.models.inputs import Pixels, Unchanged


NETWORKS = (
    "r18", "r34", "r50", "r100", "r200", "mbf", "tiny", "mini",
    "vit_t", "vit_t_dp005_mask0", "vit_s", "vit_s_dp005_mask_0", "vit_b", "vit_b_dp005_mask_005", "vit_l",
    "vit_l_dp005_mask_005", "vit_h",
)  # fmt: skip
_OF_VECTORS = re.compile(r"none|linear|mlp:[1-9]\d{0,3}")

# Families of timm whose networks have blocks of attention, and the rates with which they start (docs/encoders.md).
_ATTENTION = re.compile(r"vit_|timm:.*(vit|[bd]eit|eva0|swin|cait|xcit|coat|pit_|tnt_|twins|volo|hiera)")
OF_TRANSFORMERS = {"optimizer": "adamw", "lr": 5e-4, "lr_scaling": "none", "weight_decay": 0.05}


def rates_of(network: str, named: Collection[str], optimizer: str | None) -> dict[str, Any]:
    """Returns, by flag, the optimizer and rates that a network starts with in place of the recipe's, but for the flags
    that the user has named; none for another optimizer than AdamW. optimizer: as named."""
    if not _ATTENTION.match(network) or optimizer not in (None, "adamw"):
        return {}
    return {name: value for name, value in OF_TRANSFORMERS.items() if name not in named}


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The backbone."""

    network: Annotated[str, tyro.conf.arg(aliases=["--backbone"]), Basic] = "r50"
    """Residual network by depth (r18 to r200), MobileFaceNet (mbf), arcface_torch's vision transformers (vit_t to
    vit_h), timm:NAME, FILE.py:FUNCTION, or a small one: tiny, or the demo's mini. Without a GPU the default is tiny.
    FILE.py is copied into --models-root (docs/encoders.md)."""
    embedding_size: Annotated[int, In("[1, 65536]"), Basic] = 512
    """Width of the embedding."""
    pretrained: Annotated[Path | None, Basic, MayChange] = None
    """Start from this backbone, of the same network and size: the folder of another run, a checkpoint's, its
    model.safetensors, or arcface_torch's model.pt, backbone.pth or checkpoint_gpu_0.pt."""
    pretrained_partial: Annotated[bool, MayChange] = False
    """Load only the tensors of --pretrained that fit this network by name and shape; the others are listed and start
    fresh. By default all must fit."""
    freeze_steps: int = 0
    """Steps at the start in which only class centres move. The backbone, its running statistics too, stays as it is and
    computes as in evaluations, without dropout."""
    layer_decay: Annotated[float, In("(0, 1]")] = 1.0
    """For fine-tuning a transformer: each block learns at this share of the next one's rate."""
    decay_all: bool = False
    """--weight-decay decays every parameter, as in arcface_torch. By default norms, biases and position embeddings of a
    transformer have none."""
    activation_checkpointing: Annotated[bool, MayChange] = False
    """Recompute blocks of the backbone in backward instead of storing their activations: less memory, about a third
    more computation, the same results."""
    compile: Annotated[bool, MayChange] = False
    """Compile the training of the backbone (torch.compile; needs a C++ compiler); where that fails a note says why.
    Evaluated and delivered is the network itself (docs/encoders.md)."""

    def __post_init__(self) -> None:
        if self.network.startswith("timm:"):
            if find_spec("timm") is None:
                raise ValueError(f"--network {self.network} needs timm: `{install('timm')}`")
        elif ".py:" in self.network:
            if not (file := Path(self.network.rpartition(":")[0])).is_file():
                raise ValueError(f"--network {self.network}: there is no file {file}")
        elif self.takes_vectors:
            for name in ("layer_decay", "activation_checkpointing", "compile"):
                if is_given(self, name):
                    raise ValueError(f"{flag(name)} with --network {self.network}: it has no such layers; leave it out")
        elif self.network not in NETWORKS:
            hint = ELSEWHERE.get(f"network {self.network.lower()}") or f"see --help{near(self.network, NETWORKS)}"
            raise ValueError(f"--network is {self.network}; expected one of {', '.join(NETWORKS)}, timm:NAME, "
                             f"FILE.py:FUNCTION, or for vectors none, linear, mlp:512; {hint}")  # fmt: skip
        check_numbers(self)
        if self.pretrained_partial and self.pretrained is None:
            raise ValueError("--pretrained-partial requires --pretrained")

    @property
    def takes_vectors(self) -> bool:
        return _OF_VECTORS.fullmatch(self.network) is not None

    def optimizer_options(self) -> dict[str, Any]:
        """Returns what the backbone's optimizer is to know besides the shared flags, of optim.backbone.build."""
        everything = {"decay_biases": True, "decay_norms": True, "no_decay": ()} if self.decay_all else {}
        return {"layer_decay": self.layer_decay, **everything}


@dataclass
class Network:
    """The parts of a backbone."""

    module: nn.Module
    to_input: Pixels | Unchanged
    contract: dict[str, str]
    embedding_size: int
    notes: list[str] = field(default_factory=list)
    code: Path | None = None  # the file whose function made the module


def build(model: ModelFlags, image_size: int, flip: bool = True) -> Network:
    """Builds the network with weights from torch's global generator. image_size: of a network of vectors their width.
    flip: embeddings add the flipped image. Raises ValueError for an unsupported network."""
    import torch

    from partial_fc import models
    from partial_fc.embedding import load
    from partial_fc.foreign import networks
    from partial_fc.foreign.state_dicts import load_state
    from partial_fc.models import encoders
    from partial_fc.train import activation_checkpointing

    width = image_size if model.network == "none" else model.embedding_size
    if is_given(model, "embedding_size") and width != model.embedding_size:
        raise ValueError(f"--embedding-size {model.embedding_size}: with --network none it is the vectors' {width}")
    module = models.build(model.network, width, image_size)
    is_encoder, to_input = encoders.is_encoder(model.network), encoders.input_of(module)
    file = Path(model.network.rpartition(":")[0]) if ".py:" in model.network else None
    name = model.network if file is None else f"{file.name}:{model.network.rpartition(':')[2]}"
    notes = [f"{name}: {note}" for note in [encoders.note(module, image_size)] if note]
    if model.pretrained:
        wanted = networks.Network(name, width, image_size)
        remedy = ""
        try:
            stored = load.stored_at(model.pretrained)
            stored.check_input(to_input)
            notes += [f"--pretrained {stored.source}: {note}" for note in [stored.facts.get("note")] if note]
            if model.pretrained_partial:
                notes.append(f"--pretrained-partial: {stored.start_partly(module)}")
            else:
                remedy = "; --pretrained-partial takes what fits"
                if is_encoder:
                    load_state(module, stored.weights, stored.source)
                elif encoders.is_encoder(theirs := stored.facts.get("network", "")):
                    raise ValueError(f"{stored.source} is a backbone {theirs}; this run has {wanted}")
                else:
                    load.check(stored).start(module, wanted)
        except ValueError as error:
            raise ValueError(f"--pretrained {error}{remedy}") from error
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if model.activation_checkpointing:
        activation_checkpointing.enable(module)
    contract = {
        "network": name,
        "embedding_size": str(width),
        "image_size": str(image_size),
        "output": "float32 (N, embedding_size), not normalised",
        "flip": "true" if flip else "false",
    }
    if model.takes_vectors:
        contract |= {"input_size": contract.pop("image_size"), "flip": "false"}
    return Network(module, to_input, contract, width, notes, code=file)


def rate_notes(module: nn.Module, optim: OptimFlags, schedule: ScheduleFlags, global_batch: int) -> Iterator[str]:
    """Yields a note where a transformer starts at a learning rate that is known to diverge."""
    scale = global_batch / schedule.base_batch_size if schedule.lr_scaling == "linear" else 1.0
    if hasattr(module, "no_weight_decay") and (optim.optimizer == "sgd" or schedule.lr * scale > 1.001e-3):
        rate = f"--optimizer {optim.optimizer} at learning rate {schedule.lr * scale:g}"
        yield f"{rate}: transformers have diverged so (docs/encoders.md)"
