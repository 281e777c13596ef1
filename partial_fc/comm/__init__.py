"""Who we are and how we talk: the only place that knows Horovod or torch.distributed.

    world = comm.init()
    total_GD = world.all_reduce(part_GD, name="head/sum")
    world.close()

`init` looks at how this process was launched: horovodrun or mpirun -> Horovod; torchrun, srun or our own --nodes and
--gpus -> torch.distributed; neither -> one process, for which every collective is the identity.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partial_fc.comm.auth.handshake import read_secret
from partial_fc.comm.launch import addresses
from partial_fc.comm.launch.detect import Launch, StartError, detect, has_agent, started_here
from partial_fc.comm.single import SingleWorld
from partial_fc.comm.watch.watchdog import report_failure
from partial_fc.comm.world import CollectiveError, Work, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "CollectiveError",
    "Launch",
    "SingleWorld",
    "StartError",
    "Work",
    "World",
    "all_gather_json",
    "detect",
    "from_process_group",
    "has_agent",
    "init",
    "report_failure",
    "started_here",
]


def init(
    device: str = "cpu",
    *,
    comm_timeout_s: float = 600.0,
    start_timeout_s: float = 120.0,
    network_interface: str | None = None,
    secret_file: Path | None = None,
) -> World:
    """Join the other processes of this launch.

    device: "cpu" or "cuda": where the tensors that will be exchanged live (torch.distributed picks gloo or NCCL
    by it; Horovod decides by each tensor). Equal on all ranks.
    comm_timeout_s: seconds that a collective may take before it counts as hung; 0: for ever.
    start_timeout_s: seconds in which all ranks must have come together, over torch.distributed and where horovodrun
    lets them come and go. (Else horovodrun has its own --start-timeout.)
    network_interface: where hosts have several networks, the name of the one to use.
    secret_file: where torch.distributed's ranks meet, of which each host has a copy; a rank without it is not let in.

    Raises ValueError for a launch that is only half set up, or a file that others may read; StartError where the ranks
    do not find each other or were given different devices.
    """
    if not (comm_timeout_s >= 0 and math.isfinite(comm_timeout_s)):
        raise ValueError(f"comm_timeout_s is {comm_timeout_s}; expected seconds, or 0 for ever")
    if not (start_timeout_s > 0 and math.isfinite(start_timeout_s)):
        raise ValueError(f"start_timeout_s is {start_timeout_s}; expected more than 0 seconds")
    launch = detect()
    if network_interface:
        addresses.choose(network_interface)
    world: World
    if launch.backend == "horovod":
        from partial_fc.comm.horovod import HorovodWorld

        world = HorovodWorld(launch, device, comm_timeout_s, start_timeout_s)
    elif launch.backend == "torch":
        from partial_fc.comm.torch_dist import TorchWorld

        secret = read_secret(secret_file) if secret_file else None
        world = TorchWorld(launch, device, comm_timeout_s, start_timeout_s, secret)
    else:
        world = SingleWorld()
    world.watch(comm_timeout_s, network_interface)
    return world


def all_gather_json(value: Any, world: World, name: str) -> list[Any]:
    """What each rank gives, as JSON, by rank. A collective."""
    import torch

    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    size_W = world.all_gather(torch.tensor([len(text)]), name=f"{name}/size").tolist()
    texts = world.start_all_gather(text, size_W, name=name).wait()
    return [json.loads(bytes(part.tolist())) for part in texts.split(size_W)]


def from_process_group(group: "ProcessGroup | None" = None) -> World:
    """The ranks of a torch.distributed group, None: of all processes, for programs that have set that up themselves.

    A group of its own (`torch.distributed.new_group()`) keeps these collectives apart from the caller's. Its timeout is
    the caller's, too; `world.watch` names the ranks that are missing, where wanted.
    """
    from partial_fc.comm.torch_dist import GroupWorld

    return GroupWorld(group)
