"""The transfer of a rank's share to others, as a stream of bytes in pieces."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partial_fc.checkpoint import crc32
from partial_fc.checkpoint.rows import Part
from partial_fc.checkpoint.snapshot import Snapshot, TableShare
from partial_fc.comm import World, all_gather_json

# The most bytes of a rank in flight.
PIECE_BYTES = 16 << 20


class ArrivedDamaged(ValueError):
    """The received data differs from what was sent."""


class ByteStream:
    """The bytes of contiguous CPU tensors, one after the other, from front to back."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._flat = [(name, crc32.as_bytes(t)) for name, t in tensors.items() if t.numel()]
        self._tensor = self._offset = 0  # the current tensor, and the position in it
        self.num_bytes = sum(len(data) for _, data in self._flat)
        # The CRCs of what was written to each so far.
        self.crcs = dict.fromkeys(tensors, 0)

    def read(self, num_bytes: int) -> Tensor:
        """Returns the next bytes: uint8 (num_bytes,)."""
        return torch.cat([torch.empty(0, dtype=torch.uint8), *(view for _, view in self._advance(num_bytes))])

    def write(self, data_N: Tensor) -> None:
        """Writes over the next bytes."""
        begin = 0
        for name, view in self._advance(len(data_N)):
            self.crcs[name] = crc32.copy(data_N[begin : begin + len(view)], view, self.crcs[name])
            begin += len(view)

    def _advance(self, num_bytes: int) -> Iterable[tuple[str, Tensor]]:
        while num_bytes:
            name, data = self._flat[self._tensor]
            view = data[self._offset : self._offset + num_bytes]
            num_bytes -= len(view)
            self._offset += len(view)
            if self._offset == len(data):
                self._tensor, self._offset = self._tensor + 1, 0
            yield name, view


def outline(share: Snapshot) -> dict[str, Any]:
    """Returns names, dtypes, shapes and CRCs, as JSON, for `empty_share`."""
    return {
        "crcs": {name: share.crcs[name] for name in share.own},
        "rank": share.rank,
        "world_size": share.world_size,
        "step": share.step,
        "local": shapes(share.local),
        "tables": {
            name: {
                "parts": [[part.start, part.stop, shapes(part.tensors)] for part in table.parts],
                "hard_negatives": shapes(table.hard_negatives),
            }
            for name, table in share.tables.items()
        },
    }


def empty_share(outlined: Mapping[str, Any]) -> Snapshot:
    """Allocates a share of another rank, without the replicated state."""
    return Snapshot(
        outlined["rank"],
        outlined["world_size"],
        outlined["step"],
        {},
        {},
        {},
        empty(outlined["local"]),
        {
            name: TableShare(
                [Part(start, stop, empty(tensors)) for start, stop, tensors in table["parts"]],
                empty(table["hard_negatives"]),
            )
            for name, table in outlined["tables"].items()
        },
        crcs=outlined["crcs"],
    )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns name -> [dtype, shape], as JSON."""
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def empty(shaped: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates the tensors that `shapes` describes."""
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shaped.items()}


def broadcast_tensors(tensors: Mapping[str, Tensor] | None, root: int, world: World, name: str) -> dict[str, Tensor]:
    """Sends the tensors of rank `root` to all ranks; the others pass None. A collective, of PIECE_BYTES at a time.
    Raises ArrivedDamaged, on all ranks, if one of them received damaged data."""
    given = tensors if world.rank == root and tensors is not None else {}
    crcs = {key: crc32.crc32(t) for key, t in given.items()}
    shaped, crcs = all_gather_json([shapes(given), crcs], world, f"{name}/names")[root]
    result = {key: t.contiguous() for key, t in given.items()} if world.rank == root else empty(shaped)
    stream = ByteStream({key: result[key] for key in shaped})
    left = stream.num_bytes
    while left:
        size = min(PIECE_BYTES, left)
        piece = stream.read(size) if world.rank == root else torch.empty(size, dtype=torch.uint8)
        piece = world.broadcast(piece, root, name=name)
        if world.rank != root:
            stream.write(piece)
        left -= size
    damaged = [key for key in crcs if world.rank != root and stream.crcs[key] != crcs[key]]
    check_arrived([f"{key} of rank {root}" for key in damaged], world, name)
    return result


def check_arrived(damaged: Sequence[str], world: World, name: str) -> None:
    """Raises ArrivedDamaged, on all ranks, if one has an entry in `damaged`. A collective."""
    for rank, names in enumerate(all_gather_json(list(damaged), world, f"{name}/damaged")):
        if names:
            raise ArrivedDamaged(f"{names[0]} arrived damaged on rank {rank} (its CRC-32 is another)")
