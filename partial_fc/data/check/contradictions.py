"""Finds labels that contradict the embeddings of a training set: classes that are one, images of another class, classes
that are two.

N images, K nearest neighbours of each, D numbers of an embedding, C classes, P pairs of classes, S suspects, M images
of a class.
"""

import numpy as np
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.data.sets.changed import Change, root_of

# Chosen on characters that docs/after-training.md does not measure on (docs/log.md, 2026-11-29).
NEIGHBOURS = 15
NEAREST = 0.75  # of the other images of both classes, so that small classes tell something, too
ONE = 0.9  # of the neighbours in the other class that two classes would have with labels drawn at random
GAP = 0.2  # by which a suspect's cosine with another class exceeds that with its own
VOTES = 2  # neighbours of that other class
MARGIN = 0.05  # by which the cosine with the class that a suspect is moved to exceeds that with the next
TWO = 0.4  # cosine between the two parts of a class, in parts of that within them; both beyond that of any two classes
FEWEST = 3  # images of a new class

_Rows = NDArray[np.float32]
_Labels = NDArray[np.int64]


def find_changes(row_ND: _Rows, label_N: _Labels, near_NK: _Labels, num_classes: int, bar: str = "") -> list[Change]:
    """Returns merges, then the images that are moved, left out or of a new class; each kind with the most certain
    first.

    Two classes are one if their images are neighbours of the other's images at least ONE times as often as with labels
    drawn at random; only the nearest of their images count, a share NEAREST. An image is a suspect if none of its
    NEIGHBOURS is of its class, VOTES or more are of one other class, and its cosine with the mean of that class is GAP
    larger than with the mean of the others of its own. It moves to the class that most of the neighbours without
    suspects have, if that has the nearest mean, too, by MARGIN; else it is left out. A class is two if two means divide
    it into parts of FEWEST images or more that are unlike: see TWO. Classes of one image stay as they are.

    row_ND: of length 1. near_NK: the nearest images of each, without itself. bar: the name of a progress bar."""
    count_C = np.bincount(label_N, minlength=num_classes)
    joined, changes = _merges(row_ND, label_N, near_NK, count_C)
    class_N = np.array([root_of(joined, label) for label in range(num_classes)], np.int64)[label_N]
    suspects, moves = _suspects(row_ND, label_N, class_N, near_NK, num_classes)
    trusted = np.setdiff1d(np.arange(len(label_N)), suspects)
    splits = _splits(row_ND, label_N, class_N, trusted, num_classes, bar)
    return [one for kind in (changes, moves, splits) for one in sorted(kind, key=lambda change: -change.certainty)]


def _sums(row_ND: _Rows, class_N: _Labels, num_classes: int) -> _Rows:
    import torch

    sum_CD = torch.zeros(num_classes, row_ND.shape[1])
    return sum_CD.index_add_(0, torch.from_numpy(class_N), torch.from_numpy(row_ND)).numpy()


def _unit(row_ND: _Rows) -> _Rows:
    length_N = np.linalg.norm(row_ND, axis=1, keepdims=True)
    return (row_ND / np.where(length_N > 0, length_N, 1)).astype(np.float32, copy=False)


# ---- classes that are one


def _merges(row_ND: _Rows, label_N: _Labels, near_NK: _Labels, count_C: _Labels) -> tuple[dict[int, int], list[Change]]:
    num_classes = len(count_C)
    near_label_NK = label_N[near_NK]
    differs_NK = near_label_NK != label_N[:, None]
    own_C = np.bincount(label_N, (~differs_NK).sum(axis=1), num_classes)
    one, other = np.broadcast_to(label_N[:, None], near_NK.shape)[differs_NK], near_label_NK[differs_NK]
    key_P, links_P = np.unique(np.minimum(one, other) * num_classes + np.maximum(one, other), return_counts=True)
    a_P, b_P = np.divmod(key_P, num_classes)
    several_P = (count_C[a_P] > 1) & (count_C[b_P] > 1)
    share_P = links_P / (links_P + own_C[a_P] + own_C[b_P])
    likely_P = several_P & (share_P >= ONE * _chance(count_C[a_P], count_C[b_P]))
    images_of = np.split(np.argsort(label_N, kind="stable"), np.cumsum(count_C)[:-1])
    unit_CD = _unit(_sums(row_ND, label_N, num_classes))
    joined: dict[int, int] = {}
    changes = []
    for a, b in zip(a_P[likely_P].tolist(), b_P[likely_P].tolist(), strict=True):
        # Of two small classes all images would be among the neighbours.
        image_M = np.concatenate((images_of[a], images_of[b]))
        near_MK = near_label_NK[image_M]
        inside_MK = (near_MK == a) | (near_MK == b)
        inside_MK &= inside_MK.cumsum(axis=1) <= NEAREST * (len(image_M) - 1)
        cross = (near_MK != label_N[image_M][:, None]) & inside_MK
        mixed = float(cross.sum() / inside_MK.sum() / _chance(count_C[a], count_C[b]))
        if mixed < ONE:
            continue
        small, large = sorted((a, b), key=lambda label: (count_C[label], -label))
        root, grown = root_of(joined, small), root_of(joined, large)
        if root != grown:
            joined[root] = grown
            why = f"neighbours in the other {mixed:.2f} times as often as in one class, "
            why += f"cosine of means {unit_CD[a] @ unit_CD[b]:.3f}, "
            why += f"{count_C[small]} and {count_C[large]} images"
            changes.append(Change("merge", -1, root, grown, min(1.0, mixed), why))
    return joined, changes


def _chance(num_a: NDArray[np.int64], num_b: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the share of a neighbour of the other class if labels say nothing."""
    both = num_a + num_b
    return 2 * num_a * num_b / (both * (both - 1))


# ---- images of another class


def _suspects(
    row_ND: _Rows, label_N: _Labels, class_N: _Labels, near_NK: _Labels, num_classes: int
) -> tuple[_Labels, list[Change]]:
    near_class_NK = class_N[near_NK]
    several_N = np.bincount(class_N, minlength=num_classes)[class_N] > 1
    alone = np.flatnonzero(several_N & (near_class_NK != class_N[:, None]).all(axis=1))
    sum_CD = _sums(row_ND, class_N, num_classes)
    votes_S, other_S = _most(near_class_NK[alone])
    own_S = _cosines(row_ND[alone], sum_CD[class_N[alone]] - row_ND[alone])
    gap_S = _cosines(row_ND[alone], sum_CD[other_S]) - own_S
    wrong_S = (votes_S >= VOTES) & (gap_S >= GAP)
    suspects, own_S, gap_S = alone[wrong_S], own_S[wrong_S], gap_S[wrong_S]
    is_suspect_N = np.zeros(len(class_N), np.bool_)
    is_suspect_N[suspects] = True

    trusted = np.flatnonzero(~is_suspect_N)
    unit_CD = _unit(_sums(row_ND[trusted], class_N[trusted], num_classes))
    near_SK = np.where(is_suspect_N[near_NK[suspects]], -1, near_class_NK[suspects])
    votes_S, to_S = _most(near_SK)
    cosine_SK = np.full(near_SK.shape, -1.0)
    for k in range(near_SK.shape[1]):
        cosine_SK[:, k] = np.einsum("sd,sd->s", row_ND[suspects], unit_CD[near_SK[:, k]])
    cosine_SK[near_SK < 0] = -1
    near_S = cosine_SK.max(axis=1, initial=-1)
    next_S = np.where(near_SK == to_S[:, None], -1, cosine_SK).max(axis=1, initial=-1)
    first_S = np.where(near_SK == to_S[:, None], cosine_SK, -1).max(axis=1, initial=-1)
    agrees_S = (votes_S >= VOTES) & (first_S - next_S >= MARGIN)
    changes = []
    for at, image in enumerate(suspects.tolist()):
        why = f"cosine {own_S[at]:.2f} with its class, {near_S[at]:.2f} with the nearest; "
        why += f"{votes_S[at]} of {(near_SK[at] >= 0).sum()} neighbours are of one class"
        action, to = ("move", int(to_S[at])) if agrees_S[at] else ("drop", -1)
        changes.append(Change(action, image, int(label_N[image]), to, min(1.0, float(gap_S[at])), why))
    return suspects, changes


def _most(class_SK: _Labels) -> tuple[_Labels, _Labels]:
    """Returns (votes, class) of the class that most of each row have; -1 does not count."""
    votes_S, most_S = np.zeros(len(class_SK), np.int64), np.full(len(class_SK), -1)
    for k in range(class_SK.shape[1]):
        of_k = class_SK[:, k]
        count_S = (class_SK == of_k[:, None]).sum(axis=1) * (of_k >= 0)
        most_S = np.where(count_S > votes_S, of_k, most_S)
        votes_S = np.maximum(count_S, votes_S)
    return votes_S, most_S


def _cosines(row_SD: _Rows, mean_SD: _Rows) -> NDArray[np.float32]:
    return np.einsum("sd,sd->s", row_SD, _unit(mean_SD))


# ---- classes that are two


def _splits(
    row_ND: _Rows, label_N: _Labels, class_N: _Labels, trusted: _Labels, num_classes: int, bar: str
) -> list[Change]:
    sum_CD = _sums(row_ND[trusted], class_N[trusted], num_classes).astype(np.float64)
    all_squares, squares = np.square(sum_CD.sum(axis=0)).sum(), np.square(sum_CD).sum()
    count_C = np.bincount(class_N[trusted], minlength=num_classes)
    elsewhere = (all_squares - squares) / max(1, len(trusted) ** 2 - np.square(count_C).sum())
    order = trusted[np.argsort(class_N[trusted], kind="stable")]
    stops_C, parts = np.cumsum(count_C), []
    large = np.flatnonzero(count_C >= 2 * FEWEST).tolist()
    for label in terminal.bar(large, desc=bar, unit="class", shown=bool(bar)):
        image_M = order[stops_C[label] - count_C[label] : stops_C[label]]
        is_second_M = _second_part(row_ND[image_M])
        first, second = image_M[~is_second_M], image_M[is_second_M]
        first_D, second_D = (row_ND[part].sum(axis=0, dtype=np.float64) for part in (first, second))
        pairs = len(first) * (len(first) - 1) + len(second) * (len(second) - 1)
        within = (first_D @ first_D + second_D @ second_D - len(image_M)) / max(1, pairs)
        between = first_D @ second_D / max(1, len(first) * len(second))
        alike = float((between - elsewhere) / max(1e-9, within - elsewhere))
        if len(second) >= FEWEST and alike <= TWO:
            why = f"{len(first)} and {len(second)} images: mean cosine {between:.2f} between them, {within:.2f} within"
            parts.append((alike, second.tolist(), why))
    return [
        Change("split", image, int(label_N[image]), num_classes + number, min(1.0, 1 - alike), why)
        for number, (alike, images, why) in enumerate(parts)
        for image in images
    ]


def _second_part(row_MD: _Rows) -> NDArray[np.bool_]:
    """Returns the smaller of two parts with the mean directions that their images are nearer to; starts from two images
    that are far from one another."""
    far = row_MD[(row_MD @ row_MD.sum(axis=0)).argmin()]
    mean_2D = np.stack((row_MD[(row_MD @ far).argmin()], far))
    is_far_M = np.zeros(len(row_MD), np.bool_)
    for _ in range(10):
        before_M, is_far_M = is_far_M, row_MD @ mean_2D[1] > row_MD @ mean_2D[0]
        if (is_far_M == before_M).all() or is_far_M.all():
            break
        mean_2D = _unit(np.stack((row_MD[~is_far_M].sum(axis=0), row_MD[is_far_M].sum(axis=0))))
    return is_far_M if 2 * is_far_M.sum() <= len(row_MD) else ~is_far_M
