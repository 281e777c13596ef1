"""A head's state for torch.distributed.checkpoint, loadable on any number of ranks.

    dcp.save({"head": head.sharded()}, checkpoint_id=folder)
    dcp.load({"head": head.sharded()}, checkpoint_id=folder)    # on as many ranks as one likes

Each table of rows is one tensor of all classes, of which a rank has some rows. DTensor cuts rows as torch.chunk does;
the ranges here are others (Shard.of), so the rows are a tensor of a kind of their own, which speaks DCP's protocol for
such (torch.distributed._checkpointable).
"""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

if TYPE_CHECKING:
    from partial_fc.head.interop.module import HeadModule


class RowShard(Tensor):
    """Rows [start, start + len) of a tensor that has num_rows of them over all ranks. Only for DCP: `size()` is that of
    the whole."""

    rows: Tensor
    start: int
    num_rows: int

    @staticmethod
    def of(rows: Tensor, start: int, num_rows: int) -> "RowShard":
        shard = Tensor._make_subclass(RowShard, rows)
        shard.rows, shard.start, shard.num_rows = rows, start, num_rows
        return shard

    def size(self, dim: int | None = None) -> Any:
        whole = torch.Size([self.num_rows, *self.rows.shape[1:]])
        return whole if dim is None else whole[dim]

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if not len(self.rows):
            return []
        return [ChunkStorageMetadata(torch.Size([self.start] + [0] * (self.rows.dim() - 1)), self.rows.shape)]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.rows)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.rows


class ShardedState:
    """A `torch.distributed.checkpoint.stateful.Stateful` of a head. It leaves out the lists of hard negatives, which
    belong to a rank and start empty."""

    def __init__(self, head: "HeadModule"):
        self._head = head

    def state_dict(self) -> dict[str, Any]:
        head = self._head
        tables = head.rows.tables()
        shards = {name: RowShard.of(t, head.shard.start, head.num_classes) for name, t in tables.items()}
        return {**shards, "common": json.dumps(head.common_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what DCP has read. Raises ValueError where it is of another head."""
        common = json.loads(state["common"])
        for name, value in self._head.identity().items():
            if common[name] != value:
                raise ValueError(f"{self._head.world}: the checkpoint has {name} {common[name]}, this head {value}")
        # DCP has read into the tables themselves; loading empties them first.
        rows = {name: shard.rows.clone() for name, shard in state.items() if name != "common"}
        self._head.load_own(common["facts"], rows)
