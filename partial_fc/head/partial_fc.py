"""Partial FC: a margin softmax over class centres that are sharded over the ranks.

One step, as the data sees it, with its three collectives (per rank: B*(D*itemsize + 12), 16*G and 4*G*D bytes):
  1. head/gather     all-gather of (feature, label, rank) rows: every rank holds feat_GD and label_G;
                     one pass over the active centres: denominators, and the features' gradient up to their division;
  2. head/softmax    all-reduce of (denominator, target's logit), two float64 a row: every rank has the loss;
                     with label smoothing four, 32*G bytes: also the sum of a row's logits and the number of classes;
  3. head/features   reduce-scatter of the features' gradient, under way from the forward on, awaited by the backward.
`step` passes over the centres a second time and moves them, chunk by chunk, while the backbone's gradients travel.
CurricularFace costs one more all-reduce, head/target, of 8*G bytes. softmax.py has the mathematics between the
collectives, kernels/ the passes.

(An, Zhu et al., "Partial FC: Training 10 Million Identities on a Single Machine", https://arxiv.org/abs/2010.05222.)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from partial_fc.comm import SingleWorld, World
from partial_fc.head import kernels
from partial_fc.head.active_rows import ActiveRows, RowSelector
from partial_fc.head.backward import Backward, DeferredGradient, Loss, concatenate, sum_gradients
from partial_fc.head.class_rows import ClassRows
from partial_fc.head.gather import FEATURE_DTYPES, Gather, GlobalBatch
from partial_fc.head.hard_negatives import HardNegatives
from partial_fc.head.kernels import Logits
from partial_fc.head.kernels.plain import unit, unit_backward
from partial_fc.head.margin import Margin, value_and_slope
from partial_fc.head.rows import RowOptimizer, RowSGD, RowTable, Storage
from partial_fc.head.sampling import Quota, Sampling
from partial_fc.head.shard import Located, Shard
from partial_fc.head.softmax import feature_gradient, find_targets, global_softmax, local_terms, logit_gradient

# The denominators of the ranks are added as sums of exp(logit) in float64, whose range ends at exp(709): with logits
# bounded by this, no maximum has to be agreed upon first, and no row can under- or overflow.
_LARGEST_LOGIT = 600.0


class PartialFC(AbstractContextManager):
    """A last layer of num_classes centres, of which this rank keeps and updates its own shard.

        loss = head(feat_BD, label_B)   # scalar of `dtype`, equal on every rank: the mean over the global batch
        loss.backward()                 # feat_BD.grad = d(loss)/d(these rows), exact: nothing is to be divided again
        head.step(lr)                   # updates the centres that took part

    The loss is that of the dense head in one process over all ranks' features, labels and (active) centres,
    `reference.loss`, and so are the gradients and, up to rounding, the centres. The batch sizes of the ranks may
    differ, and be 0. Centres start as N(0, 0.01) by (seed, class), alike for any number of ranks.

    sample_rate: the share of all classes that are negatives in a step; the classes of the batch always take part: on
    top of it or, with quota "insightface", as part of it.
    dtype: what is computed in, float32; float64 is for checks. precision: of the matrix products' operands, where the
    kernel has a choice ("auto": bf16 where the hardware multiplies such numbers); sums are float32 or wider.
    storage: dtype and place of centres and their state. impl: which kernel (kernels/). catch_up: "exact": a row is
    brought up to what a dense optimizer would have made of it; "none": it rests while it is not sampled.
    backbone_gradients: how the caller combines the ranks' gradients of the backbone: "sum" (GradientSync), or "average"
    (DistributedDataParallel, horovod.DistributedOptimizer): features then get W times their gradient.
    interclass_filtering_threshold: a negative with a larger cosine is left out of the row's softmax. sub_centres: a
    class has so many centres and its logit is that of the nearest. label_smoothing: the share of the target that is
    spread evenly over the classes that take part. sampling_correction: logits of negatives get -log(sample_rate), so
    that the loss estimates that over all classes. hard_negatives: also take part.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: Margin,
        sample_rate: float = 1.0,
        world: World | None = None,
        seed: int = 0,
        optimizer: RowOptimizer | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        impl: kernels.Impl = "auto",
        precision: kernels.AutoPrecision = "fp32",
        storage: Storage | None = None,
        catch_up: Literal["none", "exact"] = "none",
        backbone_gradients: Literal["sum", "average"] = "sum",
        interclass_filtering_threshold: float | None = None,
        sub_centres: int = 1,
        label_smoothing: float = 0.0,
        sampling_correction: bool = False,
        hard_negatives: HardNegatives | None = None,
        quota: Quota = "negatives",
    ):
        if sub_centres < 1:
            raise ValueError(f"sub_centres is {sub_centres}; expected at least 1")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; expected 0 <= label_smoothing < 1")
        if backbone_gradients not in ("sum", "average"):
            raise ValueError(f"backbone_gradients is {backbone_gradients!r}; expected sum or average")
        storage = storage or Storage(dtype)
        if storage.dtype == torch.float64 != dtype:
            raise ValueError(f"centres stored in float64 with dtype {dtype}: give dtype float64, too, or store less")
        self.world = world or SingleWorld()
        self.num_classes = num_classes  # of all ranks
        self.margin = margin
        self.embedding_size = embedding_size
        self.dtype = dtype
        self.shard = Shard.of(num_classes, self.world.rank, self.world.size)
        self.sampling = Sampling(num_classes, sample_rate, seed, quota)
        self.optimizer = optimizer or RowSGD()
        self.num_steps = 0  # counts `step`; with the seed it decides the negatives
        self.filter_above = interclass_filtering_threshold
        self.sub_centres = sub_centres
        self.label_smoothing = label_smoothing
        self.sampling_correction = sampling_correction
        self.hard_negatives = hard_negatives
        self._gradient_factor = self.world.size if backbone_gradients == "average" else 1
        check_options(
            margin,
            sample_rate,
            interclass_filtering_threshold=interclass_filtering_threshold,
            sub_centres=sub_centres,
            label_smoothing=label_smoothing,
            sampling_correction=sampling_correction,
            hard_negatives=hard_negatives is not None,
            quota=quota,
        )
        self.kernel = kernels.choose(impl, torch.device(device), dtype, precision)
        self.store = RowTable(
            self.shard.start * sub_centres,
            len(self.shard) * sub_centres,
            embedding_size,
            seed,
            self.optimizer,
            storage,
            device,
            catch_up,
        )
        self.margin_state = margin.state()
        self.last_step: dict[str, Tensor] = {}  # what telemetry looks at: of the last forward
        self.pending: list[DeferredGradient] = []  # one for each backward since `step`
        self._gather = Gather(num_classes, self.world)
        self._gather_labels = Gather(num_classes, self.world, "head/labels")
        self._selector = RowSelector(
            self.sampling, self.shard, sub_centres, self.store, hard_negatives, sampling_correction, dtype
        )
        # Of this step's micro-batches: their active rows, and their labels, ascending.
        self._prepared: tuple[ActiveRows, Tensor] | None = None
        self._margin_before: dict[str, Any] | None = None  # what `discard` goes back to

    def __repr__(self) -> str:
        storage = self.store.storage
        return (
            f"PartialFC({self.num_classes} classes, {self.embedding_size} wide, {self.margin}, sample rate "
            f"{self.sampling.rate}, {self.optimizer}, rows in {storage.dtype} on {storage.place}, kernel "
            f"{self.kernel.name}; {self.world}: classes [{self.shard.start}, {self.shard.stop}))"
        )

    @property
    def centres(self) -> Tensor:
        """This rank's centres, (stop - start, D) or, with sub-centres, (stop - start, sub_centres, D). Read only."""
        self.store.all_rows()
        return self.rows.tables()["centres"]

    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        """feat_BD: floating; label_B: class numbers, integers. Where the features require a gradient and autograd is
        on, this is a step of training; else only the loss is formed, and nothing learns from the batch. Raises
        ValueError, on all ranks alike, for a label outside of [0, num_classes)."""
        if feat_BD.dim() != 2 or feat_BD.shape[1] != self.embedding_size or label_B.shape != feat_BD.shape[:1]:
            raise ValueError(
                f"{self.world}: features {tuple(feat_BD.shape)} with labels {tuple(label_B.shape)}; "
                f"expected (B, {self.embedding_size}) and (B,)"
            )
        if feat_BD.dtype not in FEATURE_DTYPES:
            raise ValueError(f"{self.world}: features are {feat_BD.dtype}; expected one of {FEATURE_DTYPES}")
        training = torch.is_grad_enabled() and feat_BD.requires_grad
        with _own_arithmetic(self.store.device):
            loss, backward = self._forward(feat_BD.detach(), _class_numbers(label_B), training)
        if backward is None:
            return loss
        with torch.enable_grad():  # a rank without rows trains where the others do, whatever its features say
            leaf_BD = feat_BD if feat_BD.requires_grad else feat_BD.detach().requires_grad_()
            return Loss.apply(leaf_BD, loss, backward)

    def _forward(self, feat_BD: Tensor, label_B: Tensor, training: bool) -> tuple[Tensor, Backward | None]:
        """The collectives of a forward pass, and what softmax.py and the kernel do between them."""
        margin, world = self.margin, self.world
        batch, located, active = self._look(self._gather, feat_BD, label_B, training)
        label_G = batch.label_G
        unit_GD, norm_G1 = unit(batch.feat_GD.to(self.dtype))
        targets = find_targets(located, unit_GD, self.sub_centres, active)
        target_cos_G = None
        if margin.needs_target_cosines:
            target_cos_G = world.all_reduce(targets.spread(targets.cos_G.double()), name="head/target")
        if batch.training:
            if self._margin_before is None:
                self._margin_before = self.margin_state
            self.margin_state = margin.advance(self.margin_state, norm_G1[:, 0], target_cos_G)
        target_logit_G, target_slope_G = value_and_slope(margin, targets.cos_G, norm_G1[:, 0], self.margin_state)

        negatives = margin.negatives(target_cos_G, self.margin_state)
        if self.filter_above is not None:
            negatives = replace(negatives, filter_above=self.filter_above)
        table, row_S, bias_S, k = active.table, active.row_S, active.bias_S, self.sub_centres
        logits = Logits(unit_GD, table, row_S, targets.position_G, margin.scale, negatives, bias_S, k)
        sums = self.kernel.sums(logits, batch.training, self.label_smoothing > 0)
        terms = local_terms(targets, target_logit_G, sums, margin.scale, unit_GD, logits.num_sampled)
        softmax = global_softmax(world.all_reduce(terms, name="head/softmax"), self.label_smoothing)
        self.last_step = {
            "target_cos": targets.cos_G,
            "elsewhere": targets.elsewhere_G,
            "denominator": softmax.denominator_G,
            "target_logit": softmax.target_logit_G,
        }
        loss = softmax.loss_G.mean().to(self.dtype)
        if not batch.training:
            return loss, None

        logit_grad = logit_gradient(softmax, targets, target_slope_G, sums, margin.scale, unit_GD)
        grad_unit_GD = feature_gradient(softmax, targets, sums, logit_grad, margin.scale)
        grad_feat_GD = unit_backward(grad_unit_GD, unit_GD, norm_G1)
        features = world.start_reduce_scatter(grad_feat_GD, batch.rows, name="head/features")
        if self.hard_negatives is not None:  # while they travel
            class_N = self._selector.classes(active)
            self.hard_negatives.learn(label_G, unit_GD, table, row_S, class_N, self.num_steps)
        deferred = DeferredGradient(logits, logit_grad, active.rows)
        return loss, Backward(self.pending, deferred, features, self._gradient_factor)

    def prepare(self, label_B: Tensor) -> None:
        """Several micro-batches make one step: these are their labels, of this rank, all together. Then

            for each micro-batch: (head(feat, label) / how_many).backward()
            head.step(lr)

        does what one batch of all of them would do, with one second pass over the centres. A collective, head/labels,
        of 12 bytes a label. Raises ValueError for a margin that learns from whole batches."""
        if self.margin_state:
            raise ValueError(
                f"{type(self.margin).__name__} keeps averages over whole batches: micro-batches would give it others; "
                "accumulate with another margin, or without micro-batches"
            )
        label_B = _class_numbers(label_B)
        no_feature_B0 = torch.empty(len(label_B), 0, dtype=torch.uint8, device=label_B.device)
        self._prepared = None
        batch, _, active = self._look(self._gather_labels, no_feature_B0, label_B, training=False)
        self._prepared = active, batch.label_G.sort().values

    def active_rows(self, label_G: Tensor) -> ActiveRows:
        """The rows that take part in the step of this global batch."""
        chosen = self._selector.choose(label_G, self.shard.locate(label_G), self.num_steps)
        count = None if chosen.count is None else int(chosen.count)
        return self._selector.fetch(chosen, count, self.num_steps)

    def _look(
        self, gather: Gather, feat_BD: Tensor, label_B: Tensor, training: bool
    ) -> tuple[GlobalBatch, Located, ActiveRows]:
        """Gathers and checks a batch, and finds the rows that take part in its step, or in that of all its
        micro-batches. Here, and nowhere else in a step, the host waits for numbers of the device: for all of them at
        once."""
        arrived = gather(feat_BD, label_B, training)
        label_G, selector, step = arrived.label_G, self._selector, self.num_steps
        located = self.shard.locate(label_G)
        numbers, missing_G, chosen = gather.facts(arrived), None, None
        if self._prepared is not None:
            prepared_M = self._prepared[1]
            place_G = torch.searchsorted(prepared_M, label_G).clamp_(max=len(prepared_M) - 1)
            missing_G = prepared_M[place_G] != label_G
            numbers.append(missing_G.sum())
        elif selector.fixed_shapes:
            chosen = selector.choose(label_G, located, step)
            if chosen.count is not None:
                numbers.append(chosen.count)
        lowest, highest, changed, *more = torch.stack(numbers).tolist()
        batch = gather.settle(arrived, lowest, highest, changed)
        if batch is None:
            return self._look(gather, feat_BD, label_B, training)
        if self._prepared is None:
            chosen = chosen or selector.choose(label_G, located, step)
            return batch, located, selector.fetch(chosen, more[0] if more else None, step)
        if more[0]:  # equal on all ranks
            assert missing_G is not None
            row = int(missing_G.nonzero()[0])
            raise ValueError(
                f"class {int(label_G[row])}, row {row} of the global batch, is not among the labels given to prepare() "
                "for this step: give it those of all micro-batches, and call step() or discard() after the last"
            )
        return batch, located, self._prepared[0]

    def finite(self) -> Tensor:
        """Whether all numbers of the pending gradient are finite here: bool scalar. Ranks may differ."""
        good = [torch.isfinite(x).all() for part in self.pending for x in part.tensors()]
        return torch.stack(good).all() if good else torch.ones((), dtype=torch.bool)

    def discard(self) -> None:
        """The step is not made: forgets the gradients since the last one, and what margin and lists of hard negatives
        learnt from its batch. The next step has the same negatives."""
        self.pending.clear()
        self._prepared = None
        if self._margin_before is not None:
            self.margin_state, self._margin_before = self._margin_before, None
        if self.hard_negatives is not None:
            self.hard_negatives.undo()

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the centres' gradient over all ranks (a collective), for clipping: float64 scalar.
        The gradient is not kept anywhere: this passes over the centres once more."""
        here = torch.zeros((), dtype=torch.float64, device=self.store.device)
        with _own_arithmetic(here.device):
            for _, _, _, grad_KD in self.centre_gradients():
                here += grad_KD.double().square_().sum()
        return self.world.all_reduce(here, name="head/gradient_norm")

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient that `step` will use."""
        for deferred in self.pending:
            deferred.scale(factor)

    def step(self, lr: float) -> None:
        """Updates the centres that took part since the last step, while the next step's negatives come from where they
        lie."""
        self._selector.prefetch(self.num_steps + 1)
        with _own_arithmetic(self.store.device):
            self._update_rows(lr)
        self.pending.clear()
        self._prepared = self._margin_before = None
        if self.hard_negatives is not None:
            self.hard_negatives.keep()
        self.num_steps += 1

    def _update_rows(self, lr: float) -> None:
        store, step = self.store, self.num_steps
        self.pending[:] = concatenate(self.pending)
        if len(self.pending) == 1:
            (deferred,) = self.pending
            if self.kernel.update(deferred.logits, deferred.logit_grad, store, lr, step):
                return
        for row_S, begin, end, grad_KD in self.centre_gradients():
            store.update(None if row_S is None else row_S[begin:end], begin, end, grad_KD, lr, step)
        if not self.pending:  # catching up counts every step
            store.update(None, 0, 0, store.centre_LD[:0], lr, step)

    def row_losses(self, last_step: dict[str, Tensor], num_rows: int) -> Tensor:
        """The losses of this rank's num_rows rows, from `last_step` as a forward left it; all ranks' batches are of one
        size. Without label smoothing's part."""
        loss_G = last_step["denominator"].log() - last_step["target_logit"]
        return loss_G[self.world.rank * num_rows :][:num_rows]

    def non_finite_classes(self, most: int = 5) -> list[int]:
        """Up to `most` classes of this rank with a centre that is not finite, of those that the pending passes saw."""
        classes: set[int] = set()
        for part in self.pending:
            table, row_S = part.logits.centre_LD, part.logits.row_S
            for place_K in torch.arange(part.logits.num_sampled, device=table.device).split(1 << 14):
                centre_KD = table[place_K if row_S is None else row_S[place_K]]
                bad_K = place_K[~centre_KD.isfinite().all(dim=1)]
                local_K = bad_K if part.rows is None else part.rows[bad_K]
                classes |= set((local_K // self.sub_centres + self.shard.start).tolist())
                if len(classes) >= most:
                    break
        return sorted(classes)[:most]

    def close(self) -> None:
        """Ends threads and closes files of the centres, which are not to be used after it. `with head:` does so."""
        self.store.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rows(self) -> ClassRows:
        """This rank's classes with all that belongs to them: what a checkpoint stores, together with `facts`."""
        return ClassRows(self.store, self.shard, self.sub_centres)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank's part of the head is, for torch.save: every rank saves its own. Not copies. (To load it
        with another number of ranks: partial_fc.checkpoint.)"""
        lists = {} if self.hard_negatives is None else self.hard_negatives.state()
        return {**self._identity(), "facts": self.facts(), "rows": self.row_state(), "hard_negatives": lists}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Raises ValueError for another range of classes, or another head's."""
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise ValueError(
                    f"{self.world}: the state has {name} {state.get(name)}, this head {expected}: each rank loads what "
                    "it saved, with as many ranks as saved it; partial_fc.checkpoint loads with any number"
                )
        if (self.hard_negatives is None) != (not state["hard_negatives"]):
            raise ValueError("the state is that of a head with hard negatives, or this head has them: not of both")
        self.pending.clear()
        self._prepared = self._margin_before = None
        self.load_facts(state["facts"])
        self.store.load_row_state({name: t.reshape(-1, t.shape[-1]) for name, t in state["rows"].items()})
        if self.hard_negatives is not None:
            self.hard_negatives.load_state(state["hard_negatives"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_classes": self.num_classes,
            "classes": [self.shard.start, self.shard.stop],
            "embedding_size": self.embedding_size,
            "sub_centres": self.sub_centres,
        }

    def row_state(self) -> dict[str, Tensor]:
        """Everything that a class has here, by name, one entry for each local class. Not copies."""
        return self.rows.tables()

    def facts(self) -> dict[str, Any]:
        """What there is to remember besides the rows, as JSON: equal on every rank."""
        return {
            "num_steps": self.num_steps,
            "row_seed": self.store.seed,
            "margin": self.margin_state,
            "schedule": self.store.schedule_state(),
        }

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Takes over what `facts` gave, of any rank. A margin of another kind starts anew."""
        self.store.seed = facts["row_seed"]  # rows that no step has touched yet are made from it
        self.store.load_schedule_state(facts["schedule"])
        same = facts["margin"].keys() == self.margin_state.keys()
        self.margin_state = dict(facts["margin"]) if same else self.margin.state()
        self.num_steps = facts["num_steps"]

    def centre_gradients(self) -> Iterator[tuple[Tensor | None, int, int, Tensor]]:
        """(row_S, begin, end, gradient) of everything pending; several backwards before a step are added up."""
        self.pending[:] = concatenate(self.pending)
        if len(self.pending) == 1:
            (deferred,) = self.pending
            for begin, end, grad_KD in self.kernel.centre_gradients(deferred.logits, deferred.logit_grad):
                yield deferred.rows, begin, end, grad_KD
        elif self.pending:
            rows, total = sum_gradients(self.pending, self.kernel)
            yield rows, 0, len(total), total


def check_options(
    margin: Margin,
    sample_rate: float,
    *,
    interclass_filtering_threshold: float | None,
    sub_centres: int,
    label_smoothing: float,
    sampling_correction: bool,
    hard_negatives: bool,
    quota: Quota = "negatives",
    spell: Callable[[str], str] = str,
) -> None:
    """Raises ValueError for options of PartialFC that do not go together. spell: what the user calls an option."""
    if margin.scale * margin.bound > _LARGEST_LOGIT:
        raise ValueError(
            f"{spell('scale')} {margin.scale} allows logits up to {margin.scale * margin.bound:.0f}; "
            f"expected at most {_LARGEST_LOGIT:.0f}: choose a smaller scale"
        )
    smoothing_excludes = {
        spell("interclass_filtering_threshold"): interclass_filtering_threshold is not None,
        spell("sub_centres"): sub_centres > 1,
        spell("sampling_correction"): sampling_correction,
        type(margin).__name__: margin.needs_target_cosines,
    }
    for name, used in smoothing_excludes.items():
        if used and label_smoothing:
            raise ValueError(
                f"{spell('label_smoothing')} with {name}: which classes share the smoothed part, and with which "
                "logits, is not defined there; leave one of the two out"
            )
    for name, used in {"sampling_correction": sampling_correction, "hard_negatives": hard_negatives}.items():
        if used and sample_rate == 1.0:
            raise ValueError(
                f"{spell(name)} without sampling: every class is active in every step; leave it out, or give a "
                f"{spell('sample_rate')} below 1"
            )
    if sampling_correction and quota == "insightface":
        raise ValueError(
            f"{spell('sampling_correction')} with {spell('quota')} insightface: how likely a class is to take part "
            "depends on the batch there, and may be 0; leave one of the two out"
        )


@contextmanager
def _own_arithmetic(device: torch.device) -> Iterator[None]:
    """The head forms its gradients itself, in dtypes that it chooses, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _class_numbers(label_B: Tensor) -> Tensor:
    if label_B.is_floating_point() or label_B.is_complex() or label_B.dtype == torch.bool:
        raise ValueError(f"labels are {label_B.dtype}; expected class numbers as integers, int64 for one")
    return label_B.long()
