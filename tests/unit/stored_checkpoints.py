"""Small checkpoints of several ranks, for tests of what is done with them."""

from pathlib import Path

import torch

from partial_fc.checkpoint import capture
from partial_fc.checkpoint.folders import mark
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from tests.flat import flat_head, learn

D = 6


class OneOf(SingleWorld):
    """One rank of several, alone: enough for what needs no other rank (files, class ranges)."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.rank, self.size = rank, size

    def start_all_gather(self, t, rows=None, *, name):
        return super().start_all_gather(t, name=name)  # nobody else's rows


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def heads_of(size: int, num_classes: int = 11, made=None, num_steps: int = 7, **options) -> list[PartialFC]:
    """Those of all ranks. made: the classes that have rows (None: all), random by class, alike for any size. Without
    catch-up by default: nobody knows the rates of steps that were not made."""
    options = {"catch_up": "none", **options}
    heads = [flat_head(num_classes, D, CosFace(), world=OneOf(rank, size), **options) for rank in range(size)]
    for head in heads:
        head.num_steps = num_steps
        classes = range(num_classes) if made is None else made
        class_M = torch.tensor([c for c in classes if c in range(head.shard.start, head.shard.stop)]).long()
        rows = {name: t[:1].new_zeros(len(class_M), *t.shape[1:]) for name, t in head.row_state().items()}
        for number, (name, tensor) in enumerate(sorted(rows.items())):
            for row, c in zip(tensor, class_M.tolist(), strict=True):
                generator = torch.Generator().manual_seed(100 * c + number)
                if name == "touched":
                    row.fill_(c % (num_steps + 1))
                else:
                    row.copy_(torch.randn(row.shape, generator=generator))
        head.rows.write(head.shard.start, head.shard.stop, class_M, rows)
    return heads


def save(
    folder: Path, heads: list[PartialFC], *, step: int = 7, local=None, names=None, hosts=None, **facts
) -> list[Path]:
    """Saves into one folder, or one for each group of ranks in `hosts`; returns them. local: of each rank."""
    backbone = facts.pop("backbone", {"w": torch.arange(3.0), "n": torch.tensor(3)})
    optimizer = {"w/momentum_buffer": torch.ones(3)}
    groups = hosts or [list(range(len(heads)))]
    folders = [folder if hosts is None else folder / f"host{i}" / folder.name for i in range(len(groups))]
    facts = {"position": 70, "best": {"lfw": 0.9}, "configuration": {"network": "tiny"}, **facts}
    for group, into in zip(groups, folders, strict=True):
        for rank in group:
            mine, head = local[rank] if local else {}, heads[rank]
            shot = capture(step, backbone, optimizer, mine, head, facts, world=head.world, class_names=names)
            shot.write(into, leads=rank == group[0])
        mark(into, step, group)
    return folders


def whole(heads: list[PartialFC]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([h.row_state()[name] for h in heads]) for name in heads[0].row_state()}


def one_step(head, world, num_classes: int, width: int) -> float:
    """Trains: the batch is a function of the step, whatever the number of ranks."""
    made = torch.Generator().manual_seed(head.num_steps)
    feat_GD, label_G = torch.randn(12, width, generator=made), torch.randint(0, num_classes, (12,), generator=made)
    mine = slice(world.rank, None, world.size)
    return learn(head, feat_GD[mine].clone().requires_grad_(), label_G[mine], lr=0.05).item()
