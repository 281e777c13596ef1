"""Ranks that would compute on different kinds of devices, over Horovod. (Over torch.distributed:
tests/recipes/launchers/test_spawn.py.)"""

import pytest

from partial_fc import comm

pytestmark = pytest.mark.transport


def test_ranks_without_a_gpu_among_others_are_named_on_all(world):
    if world.backend != "horovod" or world.size == 1:
        pytest.skip("needs two ranks of Horovod")
    from partial_fc.comm.horovod import HorovodWorld

    last = world.size - 1
    with pytest.raises(comm.StartError, match=rf"^rank {world.rank} of .*: rank {last} of .* on the CPU, the others"):
        HorovodWorld(comm.detect(), "cpu" if world.rank == last else "cuda")
    HorovodWorld(comm.detect(), "cuda")
