"""Who we are and how we talk: the only place that knows Horovod or torch.distributed.

    world = comm.init()
    total_GD = world.all_reduce(part_GD, name="head/sum")
    world.close()

`init` looks at how this process was launched: horovodrun or mpirun -> Horovod, torchrun -> torch.distributed,
neither -> one process, for which every collective is the identity.
"""

from partial_fc.comm.launch import Launch, detect
from partial_fc.comm.single import SingleWorld
from partial_fc.comm.world import Pending, World

__all__ = ["Launch", "Pending", "SingleWorld", "World", "detect", "init"]


def init(device: str = "cpu") -> World:
    """Join the other processes of this launch.

    device: "cpu" or "cuda": where the tensors that will be exchanged live (torch.distributed picks gloo or NCCL
    by it; Horovod decides by each tensor). Raises ValueError for a launch that is only half set up.
    """
    launch = detect()
    if launch.backend == "horovod":
        from partial_fc.comm.horovod import HorovodWorld

        return HorovodWorld(launch)
    if launch.backend == "torch":
        from partial_fc.comm.torch_dist import TorchWorld

        return TorchWorld(launch, device)
    return SingleWorld()
