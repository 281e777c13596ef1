"""A head of one's own: two PartialFC on the same features, over classes and over pairs of classes, losses added.

partial-fc train tests/recipes/two_heads.py --gpus 2 --folder DIR --models-root DIR --max-steps 8
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc.comm import World
from partial_fc.head import CosFace, Storage
from partial_fc.recipe import (
    FACE,
    Flags,
    ImageFolder,
    OptimFlags,
    PartialFC,
    Run,
    RunFlags,
    ScheduleFlags,
    SharedFlags,
    SquareImage,
    parse,
    start,
)

SIZE = 6


class TwoHeads:
    """The sum of two losses. It remembers how many steps it made, besides its tables."""

    def __init__(self, num_classes: int, world: World, dtype: torch.dtype = torch.float32, **of_fine: Any):
        options: dict[str, Any] = {"world": world, "storage": Storage(dtype)}
        of_fine = of_fine or {"sample_rate": 0.5}
        self.num_classes, self.num_steps = num_classes, 0
        self.fine = PartialFC(num_classes, SIZE, CosFace(8.0, 0.1), name="fine", **options, **of_fine)
        self.pairs = PartialFC(-(-num_classes // 2), SIZE, CosFace(8.0, 0.1), 0.5, name="pairs", **options)
        self.both = (self.fine, self.pairs)

    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        return self.fine(feat_BD, label_B) + self.pairs(feat_BD, label_B // 2)

    def prepare(self, label_B: Tensor) -> None:
        self.fine.prepare(label_B)
        self.pairs.prepare(label_B // 2)

    def finite(self) -> Tensor:
        return self.fine.finite() & self.pairs.finite()

    def discard(self) -> None:
        for table in self.both:
            table.discard()

    def gradient_square_sum(self) -> Tensor:
        return self.fine.gradient_square_sum() + self.pairs.gradient_square_sum()

    def scale_gradient(self, factor: float) -> None:
        for table in self.both:
            table.scale_gradient(factor)

    def step(self, lr: float) -> None:
        self.num_steps += 1
        for table in self.both:
            table.step(lr)

    @property
    def last_step(self) -> list[dict[str, Tensor]]:
        return [table.last_step for table in self.both]

    def row_losses(self, last_step: list[dict[str, Tensor]], num_rows: int) -> Tensor:
        fine, pairs = (table.row_losses(seen, num_rows) for table, seen in zip(self.both, last_step, strict=True))
        return fine + pairs

    def tables(self) -> dict[str, PartialFC]:
        return self.fine.tables() | self.pairs.tables()

    def state(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@dataclass(frozen=True, kw_only=True)
class Config(SharedFlags):
    """Trains a linear layer below two heads on a folder of class folders."""

    folder: Path
    run: Flags[RunFlags] = RunFlags(models_root=Path("runs/two-heads"))
    optim: Flags[OptimFlags] = OptimFlags(batch_size=8, precision="fp32", weight_decay=0.0)
    schedule: Flags[ScheduleFlags] = ScheduleFlags(lr=0.01, lr_scaling="none")


def train_here(run: Run) -> int:
    config = run.config
    source = run.open_data(lambda: ImageFolder(config.folder))
    loader = run.loader(source, SquareImage(16))
    torch.manual_seed(config.run.seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, SIZE))
    backbone = run.backbone(module, FACE, {"network": "linear"})
    head = TwoHeads(source.num_classes, run.world, backbone.precision.parameter_dtype)
    return run.train(backbone, head, loader)


def main(arguments: list[str]) -> int:
    return start("two-heads", train_here, parse(Config, arguments, "two_heads.py"))
