"""Partial FC: a margin softmax over class centres that are sharded over the ranks.

One step, as the data sees it, with its three collectives (per rank: B*(D*itemsize + 12), 16*G and 4*G*D bytes):
  1. head/gather     all-gather of (feature, label, rank) rows: every rank holds feat_GD and label_G;
                     one pass over the sampled centres: denominators, and the features' gradient up to their division;
  2. head/softmax    all-reduce of (denominator, own logit), two float64 a row: every rank has the loss;
  3. head/features   reduce-scatter of the features' gradient, under way from the forward on, taken in by the backward.
`step` passes over the centres a second time and moves them, chunk by chunk, while the backbone's gradients travel.
Margins whose negatives depend on the own cosines (CurricularFace) cost one more all-reduce, head/own, of 8*G bytes.

The local maths is in kernels/. (An, Zhu et al., "Partial FC: Training 10 Million Identities on a Single Machine",
https://arxiv.org/abs/2010.05222.)
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from partial_fc.comm import SingleWorld, World
from partial_fc.head import kernels
from partial_fc.head.centres import Centres, Storage
from partial_fc.head.loss import Loss
from partial_fc.head.margin import Margin
from partial_fc.head.pending import Pending, merge
from partial_fc.head.sampling import Sampling
from partial_fc.head.shard import Shard
from partial_fc.optim.rows import RowOptimizer, RowSGD

if TYPE_CHECKING:
    from partial_fc.head.hard_negatives import HardNegatives

# The denominators of the ranks are added as sums of exp(logit) in float64, whose range ends at exp(709): with logits
# bounded by this, no maximum has to be agreed upon first, and no row can under- or overflow.
_LARGEST_LOGIT = 600.0


class PartialFC:
    """A last layer of num_classes centres, of which this rank keeps and updates its own shard.

        loss = head(feat_BD, label_B)   # scalar of `dtype`, equal on every rank: the mean over the global batch
        loss.backward()                 # feat_BD.grad = d(loss)/d(these rows), exact: nothing is to be divided again
        head.step(lr)                   # updates the centres that took part

    sample_rate: the share of all classes that are negatives in a step; the classes of the batch always take part.
    The batch sizes of the ranks may differ, and be 0. Centres start as N(0, 0.01) by (seed, class), alike for any
    number of ranks.
    dtype: what is computed in, float32; float64 is for checks. precision: of the matrix products' operands, where the
    kernel has a choice; sums are float32 or wider everywhere. storage: dtype and place of centres and their state.
    impl: which kernel (kernels/). catch_up: "exact": a row is brought up to what a dense optimiser would have made of
    it; "none": it rests while it is not sampled.
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
        precision: kernels.Precision = "fp32",
        storage: Storage | None = None,
        catch_up: Literal["none", "exact"] = "none",
        interclass_filtering_threshold: float | None = None,
        sub_centres: int = 1,
        label_smoothing: float = 0.0,
        sampling_correction: bool = False,
        hard_negatives: "HardNegatives | None" = None,
    ):
        if margin.scale * margin.bound > _LARGEST_LOGIT:
            raise ValueError(
                f"scale {margin.scale} allows logits up to {margin.scale * margin.bound:.0f}; "
                f"expected at most {_LARGEST_LOGIT:.0f}: choose a smaller scale"
            )
        if sub_centres < 1:
            raise ValueError(f"sub_centres is {sub_centres}; expected at least 1")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; expected 0 <= label_smoothing < 1")
        self.world = world or SingleWorld()
        self.margin = margin
        self.embedding_size = embedding_size
        self.dtype = dtype
        self.shard = Shard.of(num_classes, self.world.rank, self.world.size)
        self.sampling = Sampling(num_classes, sample_rate, seed)
        self.optimizer = optimizer or RowSGD()
        self.num_steps = 0  # counts `step`; with the seed it decides the negatives
        self.filter_above = interclass_filtering_threshold
        self.sub_centres = sub_centres
        self.label_smoothing = label_smoothing
        self.sampling_correction = sampling_correction
        self.hard_negatives = hard_negatives
        self._refuse_unsupported_pairs()
        self.kernel = kernels.choose(impl, torch.device(device), dtype, precision)
        self.store = Centres(
            self.shard.start * sub_centres,
            len(self.shard) * sub_centres,
            embedding_size,
            seed,
            self.optimizer,
            storage or Storage(dtype),
            device,
            catch_up,
        )
        self.margin_state = margin.state()
        self.last_step: dict[str, Tensor] = {}  # what telemetry looks at: of the last forward
        self.pending: list[Pending] = []  # one for each backward since `step`
        self._negatives: tuple[int, Tensor] | None = (
            None  # (step, its negatives), where they were wanted early
        )

    @property
    def centres(self) -> Tensor:
        """This rank's centres, (stop - start, D) or, with sub-centres, (stop - start, sub_centres, D). Read only."""
        return self._by_class(self.store.all_rows())

    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        """feat_BD: floating; label_B: int64 class numbers. Raises ValueError, on all ranks alike, for a label outside
        of [0, num_classes)."""
        if (
            feat_BD.dim() != 2
            or feat_BD.shape[1] != self.embedding_size
            or label_B.shape != feat_BD.shape[:1]
        ):
            raise ValueError(
                f"{self.world}: features {tuple(feat_BD.shape)} with labels {tuple(label_B.shape)}; "
                f"expected (B, {self.embedding_size}) and (B,)"
            )
        return Loss.apply(feat_BD, label_B, self)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the centres' gradient over all ranks (a collective), for clipping: float64 scalar.
        The gradient is not kept anywhere: this passes over the centres once more."""
        here = torch.zeros((), dtype=torch.float64, device=self.store.device)
        for _, _, _, grad_KD in self.centre_gradients():
            here += grad_KD.double().square_().sum()
        return self.world.all_reduce(here, name="head/gradient_norm")

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient that `step` will use."""
        for pending in self.pending:
            pending.scale(factor)

    def step(self, lr: float) -> None:
        """Updates the centres that took part since the last step, and moves on to the next step's negatives, whose rows
        begin to come from where they lie, if that is elsewhere, while these are updated."""
        self._prefetch()
        fused = len(self.pending) == 1 and self.kernel.update(
            self.pending[0].logits, self.pending[0].slopes, self.store, lr, self.num_steps
        )
        if not fused:
            for row_S, begin, end, grad_KD in self.centre_gradients():
                row_K = None if row_S is None else row_S[begin:end]
                self.store.update(row_K, begin, end, grad_KD, lr, self.num_steps)
            if not self.pending:  # catching up counts every step
                self.store.update(None, 0, 0, self.store.centre_LD[:0], lr, self.num_steps)
        self.pending = []
        self.num_steps += 1

    def close(self, ended_well: bool = True) -> None:
        """Ends threads and closes files of the centres, which are not to be used after it. `with head:` does so."""
        self.store.close(ended_well)

    def __enter__(self) -> "PartialFC":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(ended_well=error_type is None)

    def row_state(self) -> dict[str, Tensor]:
        """Everything that a class has here, by name, one entry for each local class: what a checkpoint keeps."""
        return {name: self._by_class(rows) for name, rows in self.store.row_state().items()}

    def facts(self) -> dict[str, Any]:
        """What there is to remember besides the rows, as JSON: equal on every rank."""
        return {
            "num_steps": self.num_steps,
            "row_seed": self.store.seed,
            "margin": self.margin_state,
            "schedule": self.store.schedule_state(),
        }

    def made_classes(self) -> Tensor:
        """Which of this rank's classes have rows at all, bool (stop - start,): the others still are their start values,
        which need not be stored."""
        return self.store.exists_L.view(len(self.shard), self.sub_centres).any(dim=1)

    def load_row_state(self, rows: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes over what `row_state` gave, for this rank's class range, and `facts`, of any rank."""
        self.load_facts(facts)
        self.store.load_row_state({name: self._by_row(t, len(self.shard)) for name, t in rows.items()})

    def load_classes(self, begin: int, end: int, class_M: Tensor, rows: dict[str, Tensor]) -> None:
        """Classes [begin, end) of this rank's become: class_M of them (ascending) what `row_state` gave for those,
        the others what they are when never made. `load_facts` comes first."""
        table = {name: self._by_row(t, len(class_M)) for name, t in rows.items()}
        first = (begin - self.shard.start) * self.sub_centres
        stop = (end - self.shard.start) * self.sub_centres
        self.store.load_rows(first, stop, self._rows_of(class_M), table)

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Takes over what `facts` gave, of any rank. A margin of another kind, which remembers other things, starts
        anew."""
        self.store.seed = facts["row_seed"]  # rows that no step has touched yet are made from it
        self.store.load_schedule_state(facts["schedule"])
        if facts["margin"].keys() == self.margin_state.keys():
            self.margin_state = dict(facts["margin"])
        self.num_steps = facts["num_steps"]

    def _by_row(self, by_class: Tensor, num_classes: int) -> Tensor:
        return by_class.reshape(num_classes * self.sub_centres, by_class.shape[-1])

    def _by_class(self, rows: Tensor) -> Tensor:
        return rows if self.sub_centres == 1 else rows.unflatten(0, (-1, self.sub_centres))

    def _refuse_unsupported_pairs(self) -> None:
        alone = {
            "interclass filtering": self.filter_above is not None,
            "sub-centres": self.sub_centres > 1,
            "sampling correction": self.sampling_correction,
            f"{type(self.margin).__name__}'s rule for hard negatives": self.margin.needs_own_cosines,
        }
        for name, used in alone.items():
            if used and self.label_smoothing:
                raise ValueError(
                    f"label smoothing with {name}: which classes share the smoothed part is not defined there; "
                    "use one of the two"
                )
        if self.sampling.rate == 1.0:
            for name, used in (
                ("sampling correction", self.sampling_correction),
                ("hard negatives", self.hard_negatives is not None),
            ):
                if used:
                    raise ValueError(
                        f"{name} with sample rate 1: every class takes part in every step anyway"
                    )

    def centre_gradients(self) -> Iterator[tuple[Tensor | None, int, int, Tensor]]:
        """(row_S, begin, end, gradient) of everything pending; several backwards before a step are added up."""
        if len(self.pending) == 1:
            (pending,) = self.pending
            for begin, end, grad_KD in self.kernel.centre_gradients(pending.logits, pending.slopes):
                yield pending.rows, begin, end, grad_KD
        elif self.pending:
            rows, total = merge(self.pending, self.kernel)
            yield rows, 0, len(total), total

    def rows(self, label_G: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(local rows that take part in this step, ascending; -log of the probability that they do). None: all; 0."""
        if self.sampling.rate == 1.0:
            return None, None
        certain = label_G[(label_G >= self.shard.start) & (label_G < self.shard.stop)]
        if self.hard_negatives is not None:
            certain = torch.cat((certain, self.hard_negatives.classes(label_G, self.shard)))
        certain = torch.unique(certain)
        class_N = insert(self.negatives(label_G.device), certain)
        bias_S = None
        if self.sampling_correction:
            bias_N = torch.full(class_N.shape, -math.log(self.sampling.rate), device=class_N.device)
            bias_N[torch.searchsorted(class_N, certain)] = 0.0
            bias_S = bias_N.repeat_interleave(self.sub_centres)
        return self._rows_of(class_N), bias_S

    def negatives(self, device: torch.device) -> Tensor:
        """This step's drawn classes of the shard, ascending."""
        if self._negatives is not None and self._negatives[0] == self.num_steps:
            return self._negatives[1]
        return self.sampling.negatives(self.num_steps, self.shard, device)

    def _prefetch(self) -> None:
        """Sends for what is known of the next step's rows, and keeps the draw for it."""
        if self.sampling.rate == 1.0 or not self.store.can_prefetch:
            return
        class_N = self.sampling.negatives(self.num_steps + 1, self.shard, self.store.device)
        self._negatives = (self.num_steps + 1, class_N)
        self.store.prefetch(self._rows_of(class_N))

    def learn_hard_negatives(
        self, label_G: Tensor, unit_GD: Tensor, rows: Tensor | None, table: Tensor, row_S: Tensor | None
    ) -> None:
        """What the centres that take part say about which classes are near to the batch's."""
        if self.hard_negatives is None:
            return
        if rows is None:
            class_N = torch.arange(self.shard.start, self.shard.stop, device=label_G.device)
        else:
            class_N = rows[:: self.sub_centres] // self.sub_centres + self.shard.start
        self.hard_negatives.learn(label_G, unit_GD, table, row_S, class_N, self.num_steps)

    def _rows_of(self, class_N: Tensor) -> Tensor:
        """Local rows of classes of the shard, whose centres stand together."""
        first_N = (class_N - self.shard.start) * self.sub_centres
        if self.sub_centres == 1:
            return first_N
        return (first_N[:, None] + torch.arange(self.sub_centres, device=class_N.device)).flatten()


def insert(ascending: Tensor, more: Tensor) -> Tensor:
    """The union of two ascending tensors without repeats, ascending, in O(their lengths); `more` is the short one."""
    place = torch.searchsorted(ascending, more)
    there = torch.zeros_like(more, dtype=torch.bool)
    if len(ascending):
        there = ascending[place.clamp(max=len(ascending) - 1)] == more
    place, more = place[~there], more[~there]
    union = ascending.new_empty(len(ascending) + len(more))
    is_new = torch.zeros_like(union, dtype=torch.bool)
    is_new[place + torch.arange(len(more), device=more.device)] = True
    union[is_new] = more
    union[~is_new] = ascending
    return union
