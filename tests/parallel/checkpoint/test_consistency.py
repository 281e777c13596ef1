"""All ranks start from the same place, or none does."""

import pytest
import torch

from partial_fc.checkpoint.consistency import check_replicas, open_centres, open_checkpoint
from tests.unit.stored_checkpoints import heads_of, save

pytestmark = pytest.mark.transport


def checkpoint(folder, step: int):
    return save(folder, heads_of(1), step=step)[0]


def test_the_same_checkpoint_everywhere_is_opened(world, tmp_path):
    assert open_checkpoint(checkpoint(tmp_path / "a", 7), world).step == 7
    assert open_checkpoint(None, world) is None


def test_a_checkpoint_that_only_rank_0_sees_is_an_error_on_all(world, tmp_path):
    if world.size == 1:
        pytest.skip("needs two ranks")
    folder = checkpoint(tmp_path / "a", 7) if world.rank == 0 else None
    with pytest.raises(ValueError, match="rank 0 step 7, rank 1 finds none"):
        open_checkpoint(folder, world)


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(world, tmp_path):
    folder = checkpoint(tmp_path / "a", 7)
    last = world.size - 1
    if world.rank == last:
        (folder / "COMPLETE").unlink()
    message = "no complete checkpoint" if world.rank == last else f"rank {last} cannot read its checkpoint"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder, world)


@pytest.mark.parametrize("other", [(7, 8), ()])
def test_centres_are_of_one_step_on_all(world, tmp_path, other):
    last = world.size - 1
    for step in other if world.rank == last else (7,):
        save(tmp_path / f"step-{step:08d}", heads_of(1), step=step)
    if world.size == 1 and other:
        assert open_centres(tmp_path, world).step == 8
        return
    if world.rank == last and not other:
        message = "holds no complete checkpoint"
    else:
        message = f"rank {last} {'step 8' if other else 'cannot read its checkpoint'}"
    with pytest.raises(ValueError, match=message):
        open_centres(tmp_path, world)


def test_other_weights_on_one_rank_are_an_error_on_all(world):
    t = torch.arange(6.0).view(2, 3)
    check_replicas({"t": t, "half": t.half(), "7": torch.tensor(7), "turned": t.bfloat16().T}, world)
    if world.size == 1:
        return
    with pytest.raises(ValueError, match="not all ranks start from the same weights"):
        check_replicas({"t": t + (world.rank == world.size - 1)}, world)
