"""PartialFC: a margin softmax over class centres that are sharded over the ranks.

One step, as the data sees it, with its three collectives (per rank: B*(D*itemsize + 12), 16*G and 4*G*D bytes):
  1. head/gather     all-gather of (feature, label, rank) rows: every rank holds feat_GD and label_G;
                     one pass over the active centres: denominators, and the features' gradient up to their division;
  2. head/softmax    all-reduce of (denominator, target's logit), two float64 a row: every rank has the loss;
  3. head/features   reduce-scatter of the features' gradient, under way from the forward on, awaited by the backward.
`step` passes over the centres a second time and moves them, chunk by chunk, while the backbone's gradients travel.
docs/head.md has what other options send.
softmax.py has the mathematics between the collectives, kernels/ the passes.

(An, Zhu et al., "Partial FC: Training 10 Million Identities on a Single Machine", https://arxiv.org/abs/2010.05222.)
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partial_fc.comm import SingleWorld, World
from partial_fc.head import predict
from partial_fc.head.interop.compiling import outside_graphs
from partial_fc.head.interop.inputs import (
    Rows,
    check_kinds,
    device_of,
    integer_of,
    margin_of,
    num_processes,
    row_weights,
    rows_with_labels,
    world_of,
)
from partial_fc.head.interop.module import HeadModule
from partial_fc.head.interop.optimizer import HeadOptimizer
from partial_fc.head.interop.visible import CentreRows
from partial_fc.head.kernels import Logits
from partial_fc.head.kernels.choice import choose
from partial_fc.head.margin import Margin
from partial_fc.head.options import Compute, LossOptions, Sampling, check_options, check_several_labels, one_sampling
from partial_fc.head.pending import Backward, DeferredGradient, Loss, Pending
from partial_fc.head.protocol import is_table_name, scope
from partial_fc.head.rows import RowOptimizer, RowSGD, RowTable, Storage
from partial_fc.head.rows.class_rows import ClassRows
from partial_fc.head.rule import MeanSoftmax
from partial_fc.head.selection.active_rows import ActiveRows, RowSelector
from partial_fc.head.selection.batches import Batches, class_numbers
from partial_fc.head.selection.sampling import Draw
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import RowMath, own_arithmetic

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from partial_fc.head.interop.sharded import ShardedState

_log = logging.getLogger(__name__)


class PartialFC(HeadModule, AbstractContextManager["PartialFC"]):
    """A last layer of num_classes class centres. Each rank stores and updates its shard of them.

        loss = head(feat_BD, label_B)   # scalar of `dtype`, equal on every rank: the mean over the global batch
        loss.backward()                 # feat_BD.grad = d(loss)/d(these rows), exact: nothing is to be divided again
        head.step(lr)                   # updates the centres that took part

    The loss is that of the dense head in one process over all ranks' features, labels and (active) centres,
    tests/head_reference.py, and so are the gradients and, up to rounding, the centres. The batch sizes of the ranks may
    differ, and be 0. Centres start as N(0, 0.01) by (seed, class), alike for any number of ranks.

    A row may have several labels: head(feat_BD, label_BK), or with their weights head(feat_BD, label_BK, weight_BK);
    it costs about what one label costs. Rows may have weights, too.

    Arguments, with their defaults:
    num_classes, embedding_size: classes of all ranks, and numbers of a feature.
    margin ("cosface"): a Margin, such as ArcFace(scale=64.0, margin=0.5), or the name of one with its own defaults:
        arcface, cosface, softmax, adaface or curricularface.
    sample_rate (1.0): the share of all classes that are negatives in a step. The classes of the batch always take part.
        Short for Sampling(sample_rate).
    world (None: this process has all classes): comm.init(), or a process group of torch.distributed. A head without one
        that is made before torch.distributed has several processes is sharded over them at its first training step.
    seed (0): decides the start value of each class, N(0, 0.01), and the negatives of each step.
    optimizer (None: RowSGD()): RowSGD, RowAdamW or RowAdagrad, with momentum and decay; the rate is step's.
    device ("cpu"): what computes, or Compute(device, impl, precision).
    sampling (None: Sampling(sample_rate)): Sampling(rate, quota, hard_negatives, catch_up).
    storage (None: Storage()): dtype and place of centres and their state. A step computes in float32; with
        Storage(torch.float64), for checks, in float64.
    loss (None: LossOptions()): LossOptions(sub_centres, interclass_filtering_threshold, ignore_index, rule,
        backbone_gradients).
    name (""): of a head that is one of several, for its files and collectives.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: Margin | str = "cosface",
        sample_rate: float = 1.0,
        world: "World | ProcessGroup | int | None" = None,  # new_group() returns an int to others, which is refused
        seed: int = 0,
        optimizer: RowOptimizer | None = None,
        device: torch.device | str | Compute = "cpu",
        *,
        sampling: Sampling | None = None,
        storage: Storage | None = None,
        loss: LossOptions | None = None,
        name: str = "",
    ):
        super().__init__()
        check_kinds(optimizer=optimizer, sampling=sampling, storage=storage, loss=loss)
        sampling, loss = one_sampling(sample_rate, sampling), loss or LossOptions()
        check_kinds(hard_negatives=sampling.hard_negatives, rule=loss.rule)
        compute = device if isinstance(device, Compute) else Compute(device)
        on = device_of(compute.device)
        self.compute = replace(compute, device=on)
        self.num_classes = integer_of("num_classes", num_classes)  # of all ranks
        self.embedding_size = integer_of("embedding_size", embedding_size)
        self.sub_centres = integer_of("sub_centres", loss.sub_centres)
        seed = integer_of("seed", seed, least=None)
        if loss.backbone_gradients not in (None, "sum", "average"):
            raise ValueError(f"backbone_gradients is {loss.backbone_gradients!r}; expected sum or average")
        lists = sampling.hard_negatives
        if lists is not None and lists.num_classes != self.num_classes:
            raise ValueError(f"hard_negatives are of {lists.num_classes} classes, the head of {self.num_classes}")
        if not isinstance(name, str) or not is_table_name(name):
            raise ValueError(f"name is {name!r}; expected a letter and then letters, digits and _, or '' for none")
        self.name, self.scope = name, scope(name)
        self.world = world_of(world) or SingleWorld()
        self._may_join = world is None and num_processes() == 1  # until torch.distributed has several
        self.sampling, self.storage, self.loss = sampling, storage or Storage(), loss
        self.hard_negatives = lists
        self.rule = loss.rule or MeanSoftmax()
        given = loss.ignore_index
        self.ignore_index = None if given is None else integer_of("ignore_index", given, least=None)
        self.filter_above = loss.interclass_filtering_threshold
        self.optimizer = optimizer or RowSGD()
        self.dtype = torch.float64 if self.storage.dtype == torch.float64 else torch.float32
        self.num_steps = 0  # counts `step`; with the seed it decides the negatives
        self.margin = margin_of(margin)
        self.draw = Draw(self.num_classes, sampling.rate, seed, sampling.quota)
        check_options(
            self.margin,
            self.draw.rate,
            interclass_filtering_threshold=self.filter_above,
            sub_centres=self.sub_centres,
            hard_negatives=lists is not None,
        )
        if not self.rule.one_label_is_softmax:
            check_several_labels(self.margin, type(self.rule).__name__)
        self.kernel = choose(self.compute.impl, on, self.dtype, self.compute.precision)
        # What lies between the kernel's passes is done in few calls, too, where it has them.
        self._row_math: RowMath = self.kernel.row_math()
        self._make_rows()

    def _make_rows(self) -> None:
        """Makes this rank's rows, which are not created yet, for the classes and the ranks that there are."""
        self.shard = Shard.of(self.num_classes, self.world.rank, self.world.size)
        self.store = RowTable(
            self.shard.start * self.sub_centres,
            len(self.shard) * self.sub_centres,
            self.embedding_size,
            self.draw.seed,
            self.optimizer,
            self.storage,
            self.compute.device,
            self.sampling.catch_up,
        )
        self.register_buffer("centre_rows", CentreRows.of(self), persistent=False)  # the state has them by range
        self._gradient_factor = self.world.size if self.loss.backbone_gradients == "average" else 1
        self.margin_state = self.margin.state()
        self.last_step: dict[str, Tensor] = {}  # of the last forward, for `row_losses`
        self.pending = Pending()  # one for each backward since `step`
        self._has_warned = self._has_stepped = self._awaits_backward = False
        self._margin_before: dict[str, Any] | None = None  # what `discard` goes back to
        self._selector = RowSelector(self.draw, self.shard, self.sub_centres, self.store, self.hard_negatives)
        if not self.store.can_prefetch:
            self._selector.on_device = self.kernel.selector(self.draw, self.shard, self.store.device)
        self._batches = Batches(self.num_classes, self.world, self._selector, self.scope)

    def arguments(self) -> dict[str, Any]:
        """Returns what another head like this one is made with."""
        return {
            "num_classes": self.num_classes,
            "embedding_size": self.embedding_size,
            "margin": self.margin,
            "world": self.world,
            "seed": self.draw.seed,
            "optimizer": self.optimizer,
            "device": self.compute,
            "sampling": replace(self.sampling, hard_negatives=copy.deepcopy(self.hard_negatives)),
            "storage": self.storage,
            "loss": self.loss,
            "name": self.name,
        }

    def __repr__(self) -> str:
        return (
            f"PartialFC({self.num_classes} classes, {self.embedding_size} wide, {self.margin}, sample rate "
            f"{self.draw.rate}, {self.optimizer}, rows in {self.storage.dtype} on {self.storage.place}, kernel "
            f"{self.kernel.name}; {self.world}: classes [{self.shard.start}, {self.shard.stop}))"
        )

    @property
    def centres(self) -> Tensor:
        """Returns this rank's centres after all steps so far, (stop - start, D) or, with sub-centres, (stop - start,
        sub_centres, D). Read only."""
        centre_LD = self.store.centres_now()
        return centre_LD if self.sub_centres == 1 else centre_LD.unflatten(0, (-1, self.sub_centres))

    def forward(
        self, feat_BD: Tensor, label_B: Tensor, weight_BK: Tensor | None = None, row_weight_B: Tensor | None = None
    ) -> Tensor:
        """Returns the loss. feat_BD: floating, (B, D), or (..., D) such as (B, T, D) with labels (...); label_B: class
        numbers, integers.

        label_B may have K labels a row, (B, K) or (..., K), with the same K on all ranks; equal ones count once, with
        the sum of their weights, and ignore_index fills rows that have fewer. weight_BK: floating, of the labels'
        shape; only the ratios within a row count, and 0 takes a label out. None: all weigh the same.

        row_weight_B: floating, (B,) or (...), finite and 0 or more, on any device: what each row's loss is multiplied
        by. The loss is still the mean over the rows: their sum divided by their number, not by the weights' sum. All
        ranks give weights, or none does. Averages that a margin keeps are over all rows alike.

        Where autograd is on and the module trains (`eval()` ends that), this is a step of training, also for features
        that require no gradient; else only the loss is formed, and nothing learns from the batch. Raises ValueError, on
        all ranks alike, for a label outside of [0, num_classes).
        """
        return outside_graphs(PartialFC._loss)(self, feat_BD, label_B, weight_BK, row_weight_B, 0)[0]

    def loss_and_topk(
        self,
        feat_BD: Tensor,
        label_B: Tensor,
        k: int = 5,
        weight_BK: Tensor | None = None,
        row_weight_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss of `forward`, to the bit, and what `topk` would give for the classes that take part in this
        step: (loss, cosine (..., k) in the head's dtype, falling, class (..., k) int64), features being (..., D).

        For the accuracy in training: `(class_BK[:, :1] == label_B[:, None]).any(1)`. Cosines are without margin, and
        carry no gradient. With sampling the other classes of a step are not looked at, so that the accuracy is higher
        than that of `topk`; -inf and class -1 stand where fewer than k classes take part, and in rows without
        labels. The kernel finds them in the pass that forms the loss, with its products (bf16 where that is the
        head's precision). One more collective, head/topk, of 16*G*k bytes. Raises ValueError as `forward` and `topk`
        do.
        """
        predict.check_k(self, k)
        loss, nearest = outside_graphs(PartialFC._loss)(self, feat_BD, label_B, weight_BK, row_weight_B, k)
        assert nearest is not None
        cosine_BK, class_BK = nearest
        shape = (*feat_BD.shape[:-1], k)
        return loss, cosine_BK.view(shape), class_BK.view(shape)

    def _loss(
        self, feat_BD: Tensor, label_B: Tensor, weight_BK: Tensor | None, row_weight_B: Tensor | None, num_nearest: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """(loss, nearest classes of this rank's rows; None where num_nearest is 0)."""
        if getattr(self.centre_rows, "head", lambda: None)() is not self:
            raise ValueError(
                f"{self.world}: another tensor is in place of the buffer centre_rows (functional_call?); a head "
                "computes with its own rows: change them in place"
            )
        self.join_processes()
        rows = rows_with_labels(
            feat_BD, label_B, weight_BK, self.rule, self.embedding_size, self.ignore_index, self.world
        )
        rows = rows._replace(row_weight_B=row_weights(row_weight_B, rows, feat_BD.shape, self.world))
        if rows.weight_BT is not None:
            check_several_labels(self.margin, f"{self.world}: several labels a row")
        feat_BD = rows.feat_BD
        training = self.training and torch.is_grad_enabled()
        with own_arithmetic(self.store.device):
            loss, backward, nearest = self._forward(rows, training, num_nearest)
        if nearest is not None and rows.kept_B is not None:
            nearest = predict.among_all(nearest, rows.kept_B)
        if backward is None:
            return loss, nearest
        if self.pending and not self._batches.are_prepared:
            self._warn_of_pending()
        self._awaits_backward = True
        with torch.enable_grad():  # a rank without rows trains where the others do, whatever its features say
            leaf_BD = feat_BD if feat_BD.requires_grad else feat_BD.detach().requires_grad_()
            return Loss.apply(leaf_BD, loss, backward), nearest

    def _warn_of_pending(self) -> None:
        """Once: a second batch before `step` is a mistake, or wants `prepare`."""
        if not self._has_warned:
            self._has_warned = True
            sampled = "" if self.draw.rate == 1 else ", and each micro-batch now lacks the others' classes"
            warnings.warn(
                f"{self.world}: a second batch before head.step(): without it the centres stay as they are. If several "
                f"micro-batches make one step, call head.prepare(all their labels) first: without it all their "
                f"gradients are kept{sampled}",
                stacklevel=7,
            )

    def _forward(
        self, rows_B: Rows, training: bool, num_nearest: int
    ) -> tuple[Tensor, Backward | None, tuple[Tensor, Tensor] | None]:
        """The collectives of a forward pass, and what softmax.py and the kernel do between them."""
        margin, world, rows = self.margin, self.world, self._row_math
        batch, active = self._batches.look(
            *(rows_B.feat_BD.detach(), rows_B.label_B, rows_B.weight_BT, rows_B.row_weight_B),
            *(training, self.num_steps),
        )
        label_G, weight_GT, rows_W, training = batch.label_G, batch.weight_GT, batch.rows, batch.training
        row_weight_G = batch.row_weight_G
        if weight_GT is None and not self.rule.one_label_is_softmax:
            label_G, weight_GT = label_G[:, None], torch.ones_like(label_G[:, None], dtype=torch.float64)
        targets = rows.find_targets(batch.feat_GD, label_G, self.shard, self.sub_centres, active, self.dtype)
        if weight_GT is not None:
            targets.leave_out(weight_GT == 0)
        del batch  # the features as they came are done with
        target_cos_G = None
        if margin.needs_target_cosines:
            target_cos_G = world.all_reduce(targets.spread(targets.cos_G.double()), name=f"{self.scope}/target")
        if training:
            if self._margin_before is None:
                self._margin_before = self.margin_state
            self.margin_state = margin.advance(self.margin_state, targets.norm_G1[:, 0], target_cos_G)
        negatives = margin.negatives(target_cos_G, self.margin_state)
        if self.filter_above is not None:
            negatives = replace(negatives, filter_above=self.filter_above)
        unit_GD, table, row_S = targets.unit_GD, active.table, active.row_S
        logits = Logits(unit_GD, table, row_S, targets.position_G, margin.scale, negatives, self.sub_centres)
        sums = self.kernel.sums(logits, training, num_nearest)

        def summed(terms: Tensor) -> Tensor:
            return world.start_all_reduce(terms, name=f"{self.scope}/softmax", in_place=True).wait()

        if weight_GT is None:
            target_logit_G, target_slope_G = rows.with_margin(margin, targets, self.margin_state)
            terms = summed(rows.local_terms(targets, target_logit_G, sums))
            outcome = rows.finish(terms, targets, target_slope_G, sums, margin.scale, training)
        else:
            terms = summed(rows.label_terms(targets, sums))
            outcome = rows.finish_labels(
                terms, targets, weight_GT, self.rule, margin, self.margin_state, negatives, sums, training
            )
        if row_weight_G is not None:
            outcome = outcome.weighed(row_weight_G)
        self.last_step = {"loss": outcome.loss_G}
        loss, nearest = outcome.loss_G.mean().to(self.dtype), None
        if sums.nearest is not None:
            self._selector.renumber(sums.nearest, active)
            nearest = predict.of_own_rows(world, sums.nearest, rows_W, f"{self.scope}/topk")
        if outcome.logit_grad is None or outcome.grad_feat_GD is None:
            return loss, None, nearest
        features = world.start_reduce_scatter(outcome.grad_feat_GD, rows_W, name=f"{self.scope}/features")
        if self.hard_negatives is not None:  # while they travel
            class_N = self._selector.classes(active)
            self.hard_negatives.learn(label_G, unit_GD, table, row_S, class_N, self.num_steps)
        deferred = DeferredGradient(logits, outcome.logit_grad, active.rows)
        return loss, Backward(self.pending, deferred, features, self._gradient_factor), nearest

    def prepare(self, label_B: Tensor) -> None:
        """Announces the labels of all micro-batches of one step, this rank's. Then

            for each micro-batch: (head(feat, label) / how_many).backward()
            head.step(lr)

        does what one batch of all of them would do, with one second pass over the centres. A collective, head/labels,
        of 12 bytes a label. label_B: of any shape. Raises ValueError for a margin that learns from whole batches."""
        if self.margin_state:
            raise ValueError(
                f"{type(self.margin).__name__} keeps averages over whole batches: micro-batches would give it others; "
                "accumulate with another margin, or without micro-batches"
            )
        self.join_processes()
        label_B = class_numbers(label_B).flatten()
        if self.ignore_index is not None:
            label_B = label_B[label_B != self.ignore_index]
        self._batches.prepare(label_B, self.num_steps)

    def active_rows(self, label_G: Tensor) -> ActiveRows:
        """Returns the rows that take part in the step of this global batch."""
        return self._selector.fetch(self._selector.choose(label_G, self.num_steps), self.num_steps)

    def topk(self, feat_BD: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """Returns the k nearest classes of each feature over all ranks, (cosine_BK, class_BK): `predict.topk`. A
        collective."""
        return predict.topk(self, feat_BD, k)

    def logits(self, feat_BD: Tensor, class_N: Tensor) -> Tensor:
        """Returns the logits of some classes without margin, (B, N): `predict.logits`. A collective."""
        return predict.logits(self, feat_BD, class_N)

    def centres_of(self, class_N: Tensor) -> Tensor:
        """Returns the centres of some classes, whichever ranks have them: `predict.centres_of`. A collective."""
        return predict.centres_of(self, class_N)

    def rank_of(self, class_N: Tensor) -> Tensor:
        """Returns the rank that stores each class, (N,) int64."""
        return Shard.owners(predict.classes_of(class_N), self.num_classes, self.world.size)

    def sharded(self) -> "ShardedState":
        """Returns the state for torch.distributed.checkpoint, loadable on any number of ranks (interop/sharded.py)."""
        from partial_fc.head.interop.sharded import ShardedState

        return ShardedState(self)

    def as_optimizer(self, lr: float) -> HeadOptimizer:
        """Returns a torch.optim.Optimizer whose `step` updates the centres, for schedulers, GradScaler and
        frameworks."""
        return HeadOptimizer(self, lr)

    def finite(self) -> Tensor:
        """Returns whether this rank's pending gradient has neither NaN nor Inf: bool scalar. Ranks may differ."""
        return self.pending.finite()

    def discard(self) -> None:
        """Discards the gradients since the last step, and what margin and lists of hard negatives learnt from its
        batch. The next step has the same negatives."""
        if self._margin_before is not None:
            self.margin_state = self._margin_before
        self.forget()
        if self.hard_negatives is not None:
            self.hard_negatives.undo()

    def gradient_square_sum(self) -> Tensor:
        """Returns the sum of squares of the centres' gradient over all ranks (a collective), for clipping: float64
        scalar. The gradient is not kept anywhere: this passes over the centres once more."""
        with own_arithmetic(self.store.device):
            here = self.pending.square_sum(self.kernel, self.store.device)
        return self.world.all_reduce(here, name=f"{self.scope}/gradient_norm")

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient that `step` will use."""
        for deferred in self.pending:
            deferred.scale(factor)

    def step(self, lr: float) -> None:
        """Updates the centres that took part since the last step, and starts to fetch the next step's negatives."""
        if self._awaits_backward and not self.pending:
            warnings.warn(f"{self.world}: head.step() without loss.backward() moves no centre", stacklevel=2)
        self._selector.prefetch(self.num_steps + 1)
        with own_arithmetic(self.store.device):
            self.pending.update(self.kernel, self.store, lr, self.num_steps)
        self.forget()
        if self.hard_negatives is not None:
            self.hard_negatives.keep()
        self.num_steps += 1
        self._has_stepped = True

    def forget(self) -> None:
        """Drops the gradients since the last step."""
        self.pending.clear()
        self._awaits_backward = False
        self._batches.forget()
        self._margin_before = None

    def row_losses(self, last_step: dict[str, Tensor], num_rows: int, before: int | None = None) -> Tensor:
        """Returns the losses of this rank's num_rows rows, times their weights if they have some, from the `last_step`
        of a forward pass. before: the rows of lower ranks; None: all ranks' batches are of one size."""
        return last_step["loss"][self.world.rank * num_rows if before is None else before :][:num_rows]

    def non_finite_classes(self, most: int = 5) -> list[int]:
        """Returns up to `most` classes of this rank whose centre has NaN or Inf, of those in the pending gradient."""
        classes: set[int] = set()
        for bad_K in self.pending.non_finite_rows():
            classes |= set((bad_K // self.sub_centres + self.shard.start).tolist())
            if len(classes) >= most:
                break
        return sorted(classes)[:most]

    def close(self) -> None:
        """Stops threads; the head cannot be used afterwards. `with head:` calls it."""
        self.store.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rows(self) -> ClassRows:
        """Access to this rank's rows by class, for checkpoints; `facts` is the rest of the state."""
        return ClassRows(self.store, self.shard, self.sub_centres)

    def tables(self) -> dict[str, "PartialFC"]:
        """Returns the head as its own only table."""
        return {self.name: self}

    def state(self) -> dict[str, Any]:
        """Returns {}: all state is the table's."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Does nothing: all state is the table's."""

    def row_state(self) -> dict[str, Tensor]:
        """Returns the tensors of the classes by name, one entry for each local class; not copies."""
        return self.rows.tables()

    def facts(self) -> dict[str, Any]:
        """Returns the state besides the rows, as JSON, equal on every rank."""
        return {
            "num_steps": self.num_steps,
            "row_seed": self.store.seed,
            "margin": self.margin_state,
            "schedule": self.store.schedule_state(),
        }

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Loads what `facts` returned, on any rank. A margin of another kind starts with its initial state."""
        self.store.seed = facts["row_seed"]  # rows that no step has touched yet are made from it
        if self.store.load_schedule_state(facts["schedule"]):
            _log.info(
                "%s: in the steps so far centres rested while they were not sampled (catch-up none); they go on so",
                self.scope,
            )
        same = facts["margin"].keys() == self.margin_state.keys()
        self.margin_state = dict(facts["margin"]) if same else self.margin.state()
        self.num_steps = facts["num_steps"]

    def centre_gradients(self) -> Iterator[tuple[Tensor | None, int, int, Tensor]]:
        """Yields (row_S, begin, end, gradient) of the pending gradient; several backwards before a step are added
        up."""
        return self.pending.gradients(self.kernel)
