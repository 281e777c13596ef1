"""Two single-process baselines for benchmarks of the head, `plain` and `torch`; never used to train.

Both hold all of their classes in one process. With several processes, each trains its own share of the classes with the
whole batch, without communication: a lower bound. With a sample rate they train the sampled rows, as PartialFC; the
classes of the batch are added to the sample.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from partial_fc.head import CombinedMargin

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4  # those of RowSGD


class Baseline(ABC):
    """Centres (dtype) of one process under torch.optim.SGD. precision "bf16": matrix products have bfloat16 operands,
    even if centres are stored in fp32."""

    sum_dtype = torch.float32
    weight_LD: Tensor
    optimizer: torch.optim.Optimizer
    num_rows: int  # S: of the last step

    def __init__(self, margin: CombinedMargin, sample_rate: float, precision: str):
        self.margin, self.sample_rate, self.precision = margin, sample_rate, precision

    @abstractmethod
    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        """Returns the mean loss over the batch, a scalar."""

    def step(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def logit_dtype(self) -> torch.dtype:
        """Returns the dtype to which the logits' products are rounded."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def num_local(self) -> int:
        """Returns L, the classes of this process."""
        return len(self.weight_LD)


class LocalHead(Baseline):
    """A head without communication."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: CombinedMargin,
        sample_rate: float = 1.0,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(margin, sample_rate, precision)
        self.weight_LD = torch.empty(num_classes, embedding_size, device=device, dtype=dtype).normal_(0, 0.01)
        self.momentum_LD = torch.zeros_like(self.weight_LD)
        self.index_S: Tensor | None = None  # the rows of this step; None: all
        self._take(self.weight_LD, self.momentum_LD)

    def _take(self, weight_SD: Tensor, momentum_SD: Tensor) -> None:
        self.parameter_SD, self.num_rows = nn.Parameter(weight_SD), len(weight_SD)
        # One pass over centres, gradient and momentum. Not for bf16: torch 2.13 computes wrong centres on a CPU.
        fused = weight_SD.dtype == torch.float32
        self.optimizer = torch.optim.SGD(
            [self.parameter_SD], lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused
        )
        self.optimizer.state[self.parameter_SD]["momentum_buffer"] = momentum_SD

    def __call__(self, feat_GD: Tensor, label_G: Tensor) -> Tensor:
        if self.sample_rate < 1.0:
            # With replacement: this many draws leave the sampled share of the rows, cheaper than a number for each row.
            draws = round(-math.log1p(-self.sample_rate) * self.num_local)
            taken_L = torch.zeros(self.num_local, dtype=torch.bool, device=label_G.device)
            taken_L[torch.randint(self.num_local, (draws,), device=label_G.device)] = True
            taken_L[label_G] = True
            self.index_S = taken_L.nonzero().squeeze(1)
            label_G = torch.searchsorted(self.index_S, label_G)
            self._take(self.weight_LD.index_select(0, self.index_S), self.momentum_LD.index_select(0, self.index_S))
        return self.loss(feat_GD, self.parameter_SD, label_G)

    @abstractmethod
    def loss(self, feat_GD: Tensor, weight_SD: Tensor, label_G: Tensor) -> Tensor:
        """Returns the mean loss over chosen rows."""

    def step(self, lr: float) -> None:
        super().step(lr)
        if self.index_S is not None:
            self.weight_LD.index_copy_(0, self.index_S, self.parameter_SD.detach())
            self.momentum_LD.index_copy_(0, self.index_S, self.optimizer.state[self.parameter_SD]["momentum_buffer"])


class PlainHead(LocalHead):
    """The straightforward head: normalise features and centres, cosines, margin, cross_entropy, backward, SGD.

    Scales the features and subtracts the margin in place: saves two tensors of the logits' size. bf16: torch.autocast.
    """

    def loss(self, feat_GD: Tensor, weight_SD: Tensor, label_G: Tensor) -> Tensor:
        scale = self.margin.scale
        with torch.autocast(feat_GD.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            unit_GD = functional.normalize(feat_GD) * scale
            logit_GS = functional.linear(unit_GD, functional.normalize(weight_SD.to(feat_GD.dtype)))
            logit_GS[torch.arange(len(label_G), device=label_G.device), label_G] -= scale * self.margin.m3
            return functional.cross_entropy(logit_GS, label_G)


class TorchHead(LocalHead):
    """torch.nn.functional.linear_cross_entropy (torch 2.13 and later) on normalised features, and SGD.

    Does less than the other heads: it supports no margin, and the centres are not normalised, since autograd would keep
    and differentiate another tensor of their size. bf16: sums and gradients are bf16, too, as in its fastest settings.
    """

    def __init__(self, *args, **kwargs):
        if not hasattr(functional, "linear_cross_entropy"):
            raise ValueError(
                f"--versus torch: torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy; it came "
                "with 2.13"
            )
        super().__init__(*args, **kwargs)
        self.sum_dtype = self.logit_dtype

    def loss(self, feat_GD: Tensor, weight_SD: Tensor, label_G: Tensor) -> Tensor:
        operands = torch.bfloat16 if self.precision == "bf16" else torch.float32
        unit_GD = functional.normalize(feat_GD) * self.margin.scale
        options = _fastest_options(len(feat_GD), operands)
        return functional.linear_cross_entropy(unit_GD.to(operands), weight_SD.to(operands), label_G, options=options)


def _fastest_options(num_rows: int, operands: torch.dtype) -> "nn.LinearCrossEntropyOptions | None":
    """Returns its fastest settings on a CPU (docs/benchmarks.md): all logits at once for few rows, else chunks of 512.
    Its own choice, "auto", is about G * D / 2 C rows: one, for 128 rows and 100,000 classes."""
    if num_rows <= (1024 if operands == torch.bfloat16 else 512):
        return None
    policy: Literal["balanced", "compact"] = "balanced" if operands == torch.bfloat16 else "compact"
    return nn.LinearCrossEntropyOptions(batch_chunk_size=512, acc_policy=policy)
