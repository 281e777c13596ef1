"""How what only one rank has goes to others: as a run of bytes, sent in pieces and put together there."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from partial_fc.checkpoint.rows import Part
from partial_fc.checkpoint.snapshot import Snapshot
from partial_fc.comm import World

# At most so much of a rank is on its way at a time.
PIECE_BYTES = 16 << 20


class ByteStream:
    """The bytes of tensors (contiguous, on the CPU), one after the other, from front to back."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._flat = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
        self._tensor = self._offset = 0  # in which of them, and where in it
        self.num_bytes = sum(map(len, self._flat))

    def read(self, num_bytes: int) -> Tensor:
        """The next bytes: uint8 (num_bytes,)."""
        return torch.cat([torch.empty(0, dtype=torch.uint8), *self._advance(num_bytes)])

    def write(self, data_N: Tensor) -> None:
        """Writes over the next bytes."""
        begin = 0
        for view in self._advance(len(data_N)):
            view.copy_(data_N[begin : begin + len(view)])
            begin += len(view)

    def _advance(self, num_bytes: int) -> Iterable[Tensor]:
        while num_bytes:
            view = self._flat[self._tensor][self._offset : self._offset + num_bytes]
            num_bytes -= len(view)
            self._offset += len(view)
            if self._offset == len(self._flat[self._tensor]):
                self._tensor, self._offset = self._tensor + 1, 0
            yield view


def local_tensors(share: Snapshot) -> list[Tensor]:
    """What only this rank has, in the order in which `empty_share` makes room for it."""
    parts = [t for part in share.parts for t in part.tensors.values()]
    return [*parts, *share.local.values(), *share.hard_negatives.values()]


def outline(share: Snapshot) -> dict[str, Any]:
    """Names, dtypes and shapes, as JSON: what `empty_share` needs."""
    return {
        "rank": share.rank,
        "world_size": share.world_size,
        "step": share.step,
        "parts": [[part.start, part.stop, shapes(part.tensors)] for part in share.parts],
        "local": shapes(share.local),
        "hard_negatives": shapes(share.hard_negatives),
    }


def empty_share(outlined: Mapping[str, Any]) -> Snapshot:
    """Room for a share of another rank, without what is equal on all of them."""
    return Snapshot(
        outlined["rank"],
        outlined["world_size"],
        outlined["step"],
        {},
        {},
        {},
        empty(outlined["local"]),
        [Part(start, stop, empty(tensors)) for start, stop, tensors in outlined["parts"]],
        empty(outlined["hard_negatives"]),
    )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Name -> [dtype, shape], as JSON."""
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def empty(shaped: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for what `shapes` describes."""
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shaped.items()}


def all_gather_json(value: Any, world: World, name: str) -> list[Any]:
    """What each rank gives, as JSON, by rank. A collective."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    size_W = world.all_gather(torch.tensor([len(text)]), name=f"{name}/size").tolist()
    texts = world.start_all_gather(text, size_W, name=name).wait()
    return [json.loads(bytes(part.tolist())) for part in texts.split(size_W)]


def broadcast_tensors(tensors: Mapping[str, Tensor] | None, root: int, world: World, name: str) -> dict[str, Tensor]:
    """What rank `root` has, on all ranks; the others give None. A collective, of PIECE_BYTES at a time."""
    given = tensors if world.rank == root and tensors is not None else {}
    shaped = all_gather_json(shapes(given), world, f"{name}/names")[root]
    result = {key: t.contiguous() for key, t in given.items()} if world.rank == root else empty(shaped)
    stream = ByteStream(result[key] for key in shaped)
    left = stream.num_bytes
    while left:
        size = min(PIECE_BYTES, left)
        piece = stream.read(size) if world.rank == root else torch.empty(size, dtype=torch.uint8)
        piece = world.broadcast(piece, root, name=name)
        if world.rank != root:
            stream.write(piece)
        left -= size
    return result
