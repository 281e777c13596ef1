"""PowerSGD, gradients as low-rank matrices (Vogels, Karimireddy, Jaggi, 2019, https://arxiv.org/abs/1905.13727)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc import counter_rng
from partial_fc.comm import World
from partial_fc.optim.compression.base import Bucket, Compressor, GradientScale, Stages


@dataclass
class _Matrix:
    """One parameter (a, ...), viewed as a matrix of a rows and b columns, and its residual."""

    name: str
    residual_ab: Tensor  # what this rank has not sent yet
    q_br: Tensor  # orthonormal columns, equal on all ranks: the span of the last update's gradient
    # The state that `undo` restores.
    residual_before_ab: Tensor
    q_before_br: Tensor


class PowerSGD(Compressor):
    """Approximates M, the gradient plus the residual, by P Q^T with `rank` columns each; the rest is the next residual.

        1. P = M Q, with the previous update's Q, is summed over the ranks and orthonormalised.
        2. Q = M^T P is summed over the ranks. The sum of the gradients is P Q^T; the residual is M - P (the local Q)^T.

    Two all-reduces a bucket. Vectors, and matrices that P and Q would not shrink, are exact: they are sent with P. (The
    paper subtracts the mean of all ranks' Q: the residuals' total is the same.) QR rounds differently on different
    processors: bit-identical results need the same kind on all ranks. Memory: two residuals a value, the current one
    and that of `undo`.
    """

    kind = "powersgd"

    def __init__(self, rank: int, seed: int = 0):
        if rank < 1:
            raise ValueError(f"rank {rank} of powersgd: expected at least 1 (4 is usual)")
        self.rank = rank
        self.seed = seed
        self._matrices: list[list[_Matrix | None]] = []  # by bucket; None: sent uncompressed

    def prepare(self, buckets: list[Bucket]) -> None:
        assert not self._matrices, "a compressor with a memory serves one GradientSync"
        for bucket in buckets:
            named = zip(bucket.names, bucket.parameters, strict=True)
            self._matrices.append([self._matrix(name, p, bucket) for name, p in named])

    def _matrix(self, name: str, p: Tensor, bucket: Bucket) -> _Matrix | None:
        a, b = (p.shape[0], p[0].numel()) if p.dim() >= 2 and p.numel() else (1, 1)
        if self.rank * (a + b) >= a * b:
            return None
        zeros_ab = bucket.summed.new_zeros(a, b)
        q_br = self._guess(name, zeros_ab)
        return _Matrix(name, zeros_ab, q_br, zeros_ab.clone(), q_br)

    def _guess(self, name: str, like_ab: Tensor) -> Tensor:
        """Returns the first Q."""
        # On the CPU, so that all kinds of devices start equally.
        key = counter_rng.derive_key(self.seed, *f"powersgd/{name}".encode())
        guess_br = counter_rng.normal(torch.arange(like_ab.shape[1]), self.rank, key)
        return _orthonormal(guess_br.to(like_ab.dtype)).to(like_ab.device)

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        matrices = self._matrices[bucket.number]
        parts = []
        for matrix, grad in zip(matrices, bucket.views(bucket.flat), strict=True):
            if matrix is None:
                parts.append(grad.flatten().to(bucket.summed.dtype) / scale.loss_scale)
                continue
            before_ab, m_ab = matrix.residual_ab, matrix.residual_before_ab
            torch.add(before_ab, grad.reshape(m_ab.shape), alpha=1.0 / scale.loss_scale, out=m_ab)
            matrix.residual_ab, matrix.residual_before_ab = m_ab, before_ab
            parts.append((m_ab @ matrix.q_br).flatten())
        summed = yield world.start_all_reduce(torch.cat(parts), name=bucket.name, in_place=True)

        compressed: list[tuple[_Matrix, Tensor, Tensor, Tensor]] = []  # (destination of the sum, P, local Q)
        sizes = [len(part) for part in parts]
        for matrix, part, into in zip(matrices, summed.split(sizes), bucket.views(bucket.summed), strict=True):
            if matrix is None:
                into.copy_(part.view(into.shape))
                continue
            p_ar = _orthonormal(part.view(-1, self.rank))
            compressed.append((matrix, into, p_ar, matrix.residual_ab.T @ p_ar))
        if not compressed:
            return
        local_q = torch.cat([q_br.flatten() for *_, q_br in compressed])
        summed = yield world.start_all_reduce(local_q, name=f"{bucket.name}/q", in_place=True)

        parts_q = summed.split([q_br.numel() for *_, q_br in compressed])
        for (matrix, into, p_ar, q_br), part in zip(compressed, parts_q, strict=True):
            summed_br = part.view(-1, self.rank)
            into.copy_((p_ar @ summed_br.T).view(into.shape))
            matrix.residual_ab.addmm_(p_ar, q_br.T, alpha=-1.0)
            matrix.q_before_br, matrix.q_br = matrix.q_br, _orthonormal(summed_br)

    def undo(self) -> None:
        for matrix in self._compressed():
            matrix.residual_ab, matrix.residual_before_ab = matrix.residual_before_ab, matrix.residual_ab
            matrix.q_br, matrix.q_before_br = matrix.q_before_br, matrix.q_br

    def named(self) -> dict[str, Tensor]:
        residuals = {f"residual/{matrix.name}": matrix.residual_ab for matrix in self._compressed()}
        return residuals | {f"q/{matrix.name}": matrix.q_br for matrix in self._compressed()}

    def reset(self) -> None:
        super().reset()
        for matrix in self._compressed():
            matrix.q_br = self._guess(matrix.name, matrix.residual_ab)

    def _compressed(self) -> list[_Matrix]:
        return [matrix for bucket in self._matrices for matrix in bucket if matrix is not None]


def _orthonormal(t_nr: Tensor) -> Tensor:
    """Returns orthonormal columns that span those of t; arbitrary ones if t is rank-deficient. Skips QR for NaN or Inf,
    which reach the sum in M's own column."""
    return torch.linalg.qr(torch.nan_to_num(t_nr, nan=0.0, posinf=0.0, neginf=0.0)).Q
