"""Hard negatives: centres near to the batch's classes take part besides the uniformly drawn ones.

Uniform draws seldom contain the few centres that a class is confused with (ASTRA, https://arxiv.org/abs/2409.20156).
In every `every`-th step each class of the batch, by its first feature there, is compared with the active rows, and the
k nearest of this rank that are no label of that feature become its list. The centres in the list take part whenever the
class does: a list only gets nearer, as the uniform draws bring up candidates, and forgets a centre that has moved away.
After about 1 / sample rate such steps with a class in the batch all centres were candidates. Lists are kept for the
classes that were last in a batch, at most `capacity` of them, in 4 * (k + 1) bytes each. k is for each rank, so the
draw depends on W.
"""

import torch
from torch import Tensor

from partial_fc import counter_rng
from partial_fc.head.kernels.unit import unit

_CHUNK = 2048  # classes compared at a time
_NONE = -1


class HardNegatives:
    """The hard negatives of one rank: T lists, each k class numbers of its shard (int32), -1 where there are fewer."""

    def __init__(
        self, num_classes: int, k: int, every: int = 10, capacity: int = 1 << 20, device: torch.device | str = "cpu"
    ):
        if k < 1 or every < 1 or capacity < 1:
            raise ValueError(
                f"hard negatives take k, every and capacity of at least 1; got k={k}, every={every}, "
                f"capacity={capacity}"
            )
        if num_classes > torch.iinfo(torch.int32).max:
            raise ValueError(f"hard negatives number classes by 32 bits; {num_classes} classes are too many")
        self.num_classes, self.k, self.every = num_classes, k, every
        size = min(num_classes, capacity)
        self._hashed = num_classes > capacity
        self._owner_T = torch.full((size,), _NONE, dtype=torch.int32, device=device)  # whose list this is
        self._near_TK = torch.full((size, k), _NONE, dtype=torch.int32, device=device)
        # (slots, owner, near) before each `learn` since `keep`
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []

    def listed(self, label_G: Tensor) -> Tensor:
        """Returns the lists of the batch's classes: int64 (G * k,), -1 where there is none. Labels may be any
        integers."""
        slot_G = self._slot(label_G if self._hashed else label_G.clamp(0, len(self._owner_T) - 1))
        near_GK = self._near_TK[slot_G].long()
        return near_GK.masked_fill_((self._owner_T[slot_G] != label_G)[:, None], _NONE).flatten()

    def learn(
        self, label_G: Tensor, unit_GD: Tensor, table: Tensor, row_S: Tensor | None, class_N: Tensor, step: int
    ) -> None:
        """Updates the lists of the batch's classes, in the steps that are multiples of `every`.

        label_G: (G,), or (G, T) with several labels.
        table, row_S: the centres that take part, as `RowTable.fetch` gives them; class_N: the numbers of their classes;
        S is a multiple of N: the sub-centres of a class stand together and the nearest of them counts.
        """
        if step % self.every or not len(class_N):
            return
        finite_G = unit_GD.isfinite().all(dim=1)  # after an overflow in fp16 some are not
        label_GT, unit_GD = label_G.reshape(len(label_G), -1)[finite_G], unit_GD[finite_G]
        class_U, first_U = _first_of_each(label_GT.flatten())
        slot_U, chosen_U = _first_of_each(self._slot(class_U))  # of classes that share a slot, one gets it
        row_U = first_U[chosen_U].div(label_GT.shape[1], rounding_mode="floor")
        class_U, hat_UD, own_UT = class_U[chosen_U], unit_GD[row_U], label_GT[row_U]

        num_rows = len(table) if row_S is None else len(row_S)
        sub_centres = num_rows // len(class_N)
        best_UK = hat_UD.new_full((len(class_U), self.k), -torch.inf)
        near_UK = torch.full_like(best_UK, _NONE, dtype=torch.int32)
        for begin in range(0, len(class_N), _CHUNK):
            candidate_M = class_N[begin : begin + _CHUNK].int()
            rows = slice(begin * sub_centres, (begin + len(candidate_M)) * sub_centres)
            centre_KD = table[rows if row_S is None else row_S[rows]].to(hat_UD.dtype)
            cos_UM = (hat_UD @ unit(centre_KD)[0].T).unflatten(1, (-1, sub_centres)).amax(dim=2)
            for own_U in own_UT.unbind(dim=1):
                cos_UM.masked_fill_(candidate_M == own_U[:, None], -torch.inf)
            best_UK, index_UK = torch.cat((best_UK, cos_UM), dim=1).topk(self.k)
            near_UK = torch.cat((near_UK, candidate_M.expand(len(class_U), -1)), dim=1).gather(1, index_UK)
        near_UK.masked_fill_(best_UK == -torch.inf, _NONE)
        self._before.append((slot_U, self._owner_T[slot_U], self._near_TK[slot_U]))
        self._owner_T[slot_U] = class_U.int()
        self._near_TK[slot_U] = near_UK

    def keep(self) -> None:
        """Confirms what `learn` changed: the step is made."""
        self._before = []

    def undo(self) -> None:
        """Restores the lists as of the last `keep`: the step is skipped."""
        for slot_U, owner_U, near_UK in reversed(self._before):
            self._owner_T[slot_U], self._near_TK[slot_U] = owner_U, near_UK
        self._before = []

    def clear(self) -> None:
        """Empties all lists."""
        self._owner_T.fill_(_NONE)
        self._near_TK.fill_(_NONE)
        self._before = []

    def state(self) -> dict[str, Tensor]:
        """Returns the lists of this rank, for a checkpoint; not copies."""
        return {"owner": self._owner_T, "near": self._near_TK}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Loads what `state` returned. From a run with another number of ranks only what lies in the shard is used."""
        for name, mine in self.state().items():
            if state[name].shape != mine.shape:
                raise ValueError(
                    f"hard negatives: {name} has shape {tuple(state[name].shape)}, expected {tuple(mine.shape)}: "
                    "k, capacity and the number of classes must be those of the checkpoint"
                )
            mine.copy_(state[name])
        self._before = []

    def _slot(self, class_N: Tensor) -> Tensor:
        return counter_rng.hash32(class_N) % len(self._owner_T) if self._hashed else class_N


def _first_of_each(number_N: Tensor) -> tuple[Tensor, Tensor]:
    """(the different numbers, ascending; the index at which each first stands)."""
    ascending, index_N = number_N.sort(stable=True)
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    is_first[1:] = ascending.diff() > 0
    return ascending[is_first], index_N[is_first]
