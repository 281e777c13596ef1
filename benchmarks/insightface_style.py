"""A textbook sharded softmax in InsightFace's style, as a baseline for benchmarks of the head; never used to train.

Written from the published descriptions of Partial FC (https://arxiv.org/abs/2010.05222) and of a step of its well-known
implementation: float32 logits of all sampled classes at once, in three or four tensors, torch.topk over random numbers
made on the CPU to sample, three reductions for the softmax, a dense gradient over all local rows, and a dense SGD with
momentum over them. "bf16": the logits' products under torch.autocast. One difference: the classes of the batch are
added to the sample, as in PartialFC, so that all sides train equally many rows.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from partial_fc.comm import World
from partial_fc.head import CombinedMargin, Shard

from .baselines import MOMENTUM, WEIGHT_DECAY, Baseline


class InsightFaceStyleHead(Baseline):
    """Same interface and mathematics as PartialFC with CosFace, but the optimizer updates all rows."""

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: CombinedMargin,
        sample_rate: float,
        world: World,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(margin, sample_rate, precision)
        self.world = world
        self.shard = Shard.of(num_classes, world.rank, world.size)
        weight_LD = torch.empty(len(self.shard), embedding_size, device=device, dtype=dtype).normal_(0, 0.01)
        self.weight_LD = nn.Parameter(weight_LD)
        self.optimizer = torch.optim.SGD([self.weight_LD], lr=0.0, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        feat_GD = _GatherSum.apply(feat_BD, self.world)
        label_G = self.world.all_gather(label_B, name="baseline/labels")
        local_G = torch.where(
            (label_G >= self.shard.start) & (label_G < self.shard.stop), label_G - self.shard.start, -1
        )
        weight_SD: Tensor = self.weight_LD
        if self.sample_rate < 1.0:
            local_G, index_S = self._sample(local_G)
            weight_SD = self.weight_LD[index_S]
        self.num_rows = len(weight_SD)
        with torch.autocast(feat_GD.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            unit_SD = functional.normalize(weight_SD.to(feat_GD.dtype))
            logit_GS = functional.linear(functional.normalize(feat_GD), unit_SD)
        logit_GS = logit_GS.float().clamp(-1, 1)
        own = (local_G >= 0).nonzero().squeeze(1)
        minus_m3 = logit_GS.new_full((), -self.margin.m3)
        logit_GS = logit_GS.index_put_((own, local_G[own]), minus_m3, accumulate=True)
        return _CrossEntropy.apply(logit_GS * self.margin.scale, local_G, self.world)

    def _sample(self, local_G: Tensor) -> tuple[Tensor, Tensor]:
        positive = local_G[local_G >= 0].unique()
        score_L = torch.rand(len(self.shard)).to(local_G.device)
        score_L[positive] = 2.0
        num_sampled = len(positive) + int(self.sample_rate * (len(self.shard) - len(positive)))
        index_S = torch.topk(score_L, num_sampled).indices.sort().values
        return torch.where(local_G >= 0, torch.searchsorted(index_S, local_G), -1), index_S


class _GatherSum(torch.autograd.Function):
    """forward: all-gather rows; backward: sum over ranks, keep own rows."""

    @staticmethod
    def forward(ctx, feat_BD: Tensor, world: World) -> Tensor:
        ctx.world, ctx.rows = world, len(feat_BD)
        return world.all_gather(feat_BD, name="baseline/features")

    @staticmethod
    def backward(ctx, grad_GD: Tensor):
        total_GD = ctx.world.all_reduce(grad_GD, name="baseline/gradient")
        start = ctx.world.rank * ctx.rows
        return total_GD[start : start + ctx.rows], None


class _CrossEntropy(torch.autograd.Function):
    """Softmax over all ranks' logits in three reductions. The probabilities overwrite the logits, are kept for
    backward, and are overwritten there by the gradient."""

    @staticmethod
    def forward(ctx, logit_GS: Tensor, local_G: Tensor, world: World) -> Tensor:
        most_G1 = world.all_reduce(logit_GS.amax(dim=1, keepdim=True), "max", name="baseline/max")
        prob_GS = logit_GS.sub_(most_G1).exp_()
        prob_GS.div_(world.all_reduce(prob_GS.sum(dim=1, keepdim=True), name="baseline/sum"))
        own = (local_G >= 0).nonzero().squeeze(1)
        target_G = torch.zeros_like(most_G1[:, 0])
        target_G[own] = prob_GS[own, local_G[own]]
        target_G = world.all_reduce(target_G, name="baseline/target")
        ctx.save_for_backward(prob_GS, own, local_G)
        return -target_G.clamp(min=1e-30).log().mean()

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_GS, own, local_G = ctx.saved_tensors
        grad_GS[own, local_G[own]] -= 1
        return grad_GS.div_(len(grad_GS)) * grad_loss, None, None
