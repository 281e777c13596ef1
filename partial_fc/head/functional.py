"""The loss of a PartialFC head as a function of features and centres, for one process and any optimizer.

Letters: B features, D their width, C classes, K sub-centres of a class, R rows of centres (C, or C * K), S those that
take part.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partial_fc.comm import SingleWorld
from partial_fc.head.gather import FEATURE_DTYPES
from partial_fc.head.interop.compiling import outside_graphs
from partial_fc.head.interop.inputs import margin_of, rows_of
from partial_fc.head.kernels import AutoPrecision, Impl, Logits
from partial_fc.head.kernels.choice import choose
from partial_fc.head.margin import Margin
from partial_fc.head.options import check_options
from partial_fc.head.pending import DeferredGradient
from partial_fc.head.selection.active_rows import ActiveRows, insert, rows_of_classes
from partial_fc.head.selection.sampling import Draw
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import own_arithmetic


def linear_partial_cross_entropy(
    feat_BD: Tensor,
    centre_CD: Tensor,
    label_B: Tensor,
    margin: Margin | str,
    *,
    sample_rate: float = 1.0,
    generator: torch.Generator | None = None,
    sparse: bool = False,
    interclass_filtering_threshold: float | None = None,
    ignore_index: int | None = -100,
    impl: Impl = "auto",
    precision: AutoPrecision = "fp32",
) -> Tensor:
    """Returns the margin softmax loss of features against class centres, a scalar: the mean over the features.

        loss = linear_partial_cross_entropy(feat_BD, centre_CD, label_B, "cosface", sample_rate=0.1)

    equals, for the S classes that take part,

        logit_BS = normalize(feat_BD) @ normalize(centre_CD[class_S]).T      # the target's with the margin
        loss = cross_entropy(scale * logit_BS, position of label_B in class_S)

    in O(B * D) memory beside the gradients, with the kernels of PartialFC, which is the choice for more classes than
    one process holds, or for centres whose gradient is never formed as a whole.

    feat_BD: floating, (B, D), or (..., D) with labels (...)
    label_B: integers, class numbers in [0, C); rows with ignore_index take no part
    centre_CD: (C, D), or (C, K, D) for K sub-centres of a class, of which the nearest counts; float32, bfloat16 or
        float16, any length
    margin: CosFace(...), "cosface", "arcface", "softmax", as of PartialFC; none that keeps a state between steps
    sample_rate: the share of all classes that are drawn as negatives; the classes of the batch always take part
    generator: where the draw comes from; None: torch's own, which torch.manual_seed sets
    The others are PartialFC's.

    All tensors are on one device. Sums and the loss are float32, or float64 where features or centres are.

    Gradients go to both tensors, in their dtypes: that of the centres is dense, (C, D), with zeros for classes that
    take no part, or with sparse=True a sparse tensor of the S classes, as of nn.Embedding(sparse=True), for
    torch.optim.SparseAdam or SGD. Centres may not change between the call and its backward. There is no second
    derivative. Raises ValueError for shapes, dtypes, devices, labels and options that do not fit.

    (An, Zhu et al., "Partial FC: Training 10 Million Identities on a Single Machine", https://arxiv.org/abs/2010.05222.)
    """
    if centre_CD.dim() not in (2, 3) or not centre_CD.numel() or centre_CD.dtype not in FEATURE_DTYPES:
        raise ValueError(
            f"centres are {centre_CD.dtype}, {tuple(centre_CD.shape)}; expected (C, D) or (C, sub-centres, D) in one "
            f"of {FEATURE_DTYPES}"
        )
    margin = margin_of(margin)
    check_options(
        margin,
        sample_rate,
        interclass_filtering_threshold=interclass_filtering_threshold,
        sub_centres=_sub_centres(centre_CD),
        hard_negatives=False,
    )
    if margin.state():
        raise ValueError(
            f"{type(margin).__name__} remembers averages between the steps, which a function cannot: use PartialFC"
        )
    feat_BD, label_B, *_ = rows_of(feat_BD, label_B, centre_CD.shape[-1], ignore_index, SingleWorld())
    _check_batch(feat_BD, centre_CD, label_B)
    draw = Draw(len(centre_CD), sample_rate, 0 if sample_rate == 1 else _seed(generator))
    options = (margin, draw, sparse, interclass_filtering_threshold, impl, precision)
    return outside_graphs(_loss)(feat_BD, centre_CD, label_B, *options)


def _loss(feat_BD: Tensor, centre_CD: Tensor, label_B: Tensor, *options: Any) -> Tensor:
    learns = torch.is_grad_enabled() and (feat_BD.requires_grad or centre_CD.requires_grad)
    return _Loss.apply(feat_BD, centre_CD, label_B, learns, *options)


class _Loss(torch.autograd.Function):
    """The steps of `PartialFC._forward` without its collectives; the backward has the kernel's second pass."""

    @staticmethod
    def forward(
        ctx: Any,
        feat_BD: Tensor,
        centre_CD: Tensor,
        label_B: Tensor,
        learns: bool,
        margin: Margin,
        draw: Draw,
        sparse: bool,
        filter_above: float | None,
        impl: Impl,
        precision: AutoPrecision,
    ) -> Tensor:
        dtype = torch.float64 if torch.float64 in (feat_BD.dtype, centre_CD.dtype) else torch.float32
        sub_centres, device, shard = _sub_centres(centre_CD), centre_CD.device, Shard.of(len(centre_CD), 0, 1)
        with own_arithmetic(device):
            kernel = choose(impl, device, dtype, precision)
            rows = kernel.row_math()
            row_S = None
            if draw.rate < 1.0:
                row_S = rows_of_classes(insert(draw.negatives(0, shard, device), torch.unique(label_B)), sub_centres)
            active = ActiveRows(row_S, centre_CD.detach().reshape(-1, centre_CD.shape[-1]).contiguous(), row_S)
            targets = rows.find_targets(feat_BD.detach(), label_B, shard, sub_centres, active, dtype)
            target_logit_B, target_slope_B = rows.with_margin(margin, targets, {})
            target_cos_B = targets.cos_G.double() if margin.needs_target_cosines else None
            negatives = replace(margin.negatives(target_cos_B, {}), filter_above=filter_above)
            logits = Logits(
                targets.unit_GD, active.table, active.row_S, targets.position_G, margin.scale, negatives, sub_centres
            )
            sums = kernel.sums(logits, learns)
            terms = rows.local_terms(targets, target_logit_B, sums)
            outcome = rows.finish(terms, targets, target_slope_B, sums, margin.scale, learns)
            if outcome.logit_grad is not None:
                ctx.save_for_backward(centre_CD)  # so that autograd sees when they have changed
                ctx.deferred = DeferredGradient(logits, outcome.logit_grad, active.rows)
                ctx.kernel, ctx.grad_feat_BD, ctx.feat_dtype = kernel, outcome.grad_feat_GD, feat_BD.dtype
                ctx.sparse, ctx.sub_centres = sparse, sub_centres
            return outcome.loss_G.mean().to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (centre_CD,) = ctx.saved_tensors
        grad_feat, grad_centre = None, None
        with own_arithmetic(centre_CD.device):
            if ctx.needs_input_grad[0]:
                grad_feat = (ctx.grad_feat_BD * grad_loss).to(ctx.feat_dtype)
            if ctx.needs_input_grad[1]:
                grad_centre = _centre_gradient(ctx, grad_loss, centre_CD)
        return grad_feat, grad_centre, *[None] * 8


def _centre_gradient(ctx: Any, grad_loss: Tensor, centre_CD: Tensor) -> Tensor:
    """By the kernel's second pass, chunk by chunk."""
    deferred = replace(ctx.deferred)
    deferred.scale(grad_loss)
    grads = ctx.kernel.centre_gradients(deferred.logits, deferred.logit_grad)
    rows, class_size = deferred.rows, centre_CD.shape[1:]
    if ctx.sparse:
        num_rows = deferred.logits.num_sampled
        value_SD = centre_CD.new_empty(num_rows, class_size[-1])
        for begin, end, grad_KD in grads:
            value_SD[begin:end] = grad_KD
        if rows is None:
            rows = torch.arange(num_rows, device=centre_CD.device)
        class_S = rows[:: ctx.sub_centres] // ctx.sub_centres
        value = value_SD.view(len(class_S), *class_size)
        return torch.sparse_coo_tensor(class_S[None], value, centre_CD.shape, is_coalesced=True, check_invariants=False)
    grad_RD = centre_CD.new_zeros(len(centre_CD) * ctx.sub_centres, class_size[-1])
    for begin, end, grad_KD in grads:
        if rows is None:
            grad_RD[begin:end] = grad_KD
        else:
            grad_RD[rows[begin:end]] = grad_KD.to(grad_RD.dtype)
    return grad_RD.view(centre_CD.shape)


def _sub_centres(centre_CD: Tensor) -> int:
    return centre_CD.shape[1] if centre_CD.dim() == 3 else 1


def _seed(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=device))


def _check_batch(feat_BD: Tensor, centre_CD: Tensor, label_B: Tensor) -> None:
    if not feat_BD.device == centre_CD.device == label_B.device:
        raise ValueError(
            f"features are on {feat_BD.device}, centres on {centre_CD.device}, labels on {label_B.device}; expected "
            "one device"
        )
    if not len(label_B):
        raise ValueError("no row of the batch has a label that counts; expected one or more")
    num_classes = len(centre_CD)
    bad_B = ((label_B < 0) | (label_B >= num_classes)).nonzero().flatten()
    if len(bad_B):
        raise ValueError(
            f"label {int(label_B[bad_B[0]])} is outside of [0, {num_classes}) ({len(bad_B)} such label(s)); check the "
            "data's labels, or give more centres"
        )
