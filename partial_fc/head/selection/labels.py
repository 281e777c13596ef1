"""Draws some of a row's labels, so that the classes of many labels do not become the sample."""

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key, hash32

_LAST = 1 << 32  # above every hash


def draw_labels(
    label_BK: Tensor, num_drawn: int, sample_B: Tensor, step: int, seed: int = 0, ignore_index: int | None = -100
) -> Tensor:
    """Returns which of each row's labels are drawn in a step: places, int64 (B, num_drawn), for `gather`:

        place_BN = draw_labels(label_BK, 8, sample_B, head.num_steps)
        loss = head(feat_BD, label_BK.gather(1, place_BN), weight_BK.gather(1, place_BN))

    Every label of a row is as likely. The draw is a function of (seed, step, sample), so it depends neither on the
    ranks nor on a restart. sample_B: integers, the number of each row's sample in the data. Where a row has fewer
    labels than are drawn, the places of ignore_index (None: there is none) follow. Raises ValueError unless 1 <=
    num_drawn <= K.
    """
    num_labels = label_BK.shape[1] if label_BK.ndim == 2 else 0
    if not 1 <= num_drawn <= num_labels or sample_B.shape != label_BK.shape[:1]:
        raise ValueError(
            f"{num_drawn} labels drawn of labels {tuple(label_BK.shape)} with sample numbers {tuple(sample_B.shape)}; "
            f"expected 1 to {num_labels}, and {tuple(label_BK.shape[:1])}"
        )
    key_B = hash32(hash32(sample_B.long() + derive_key(seed, step, *b"labels")) ^ hash32(sample_B.long() >> 32))
    random_BK = hash32(key_B[:, None] + torch.arange(num_labels, device=label_BK.device))
    if ignore_index is not None:
        random_BK = random_BK.masked_fill(label_BK == ignore_index, _LAST)
    return random_BK.argsort(dim=1, stable=True)[:, :num_drawn]
