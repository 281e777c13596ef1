"""The ranks of a run and their collectives: the only package that uses Horovod or torch.distributed.

    world = comm.init()
    total_GD = world.all_reduce(part_GD, name="head/sum")
    world.close()

`init` chooses the backend by the launcher: horovodrun or mpirun -> Horovod; torchrun, srun or our own --nodes and
--gpus -> torch.distributed; neither -> one process, for which every collective is the identity.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from partial_fc.comm.launch import addresses
from partial_fc.comm.launch.detect import Launch, StartError, detect, has_agent, processes_here, started_here, unused
from partial_fc.comm.watch.watchdog import report_failure
from partial_fc.comm.world import CollectiveError, OtherRankFailed, SingleWorld, Work, World
from partial_fc.errors import RefusedByAll, describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def init(
    device: str = "cpu",
    *,
    comm_timeout_s: float = 600.0,
    start_timeout_s: float = 120.0,
    network_interface: str | None = None,
) -> World:
    """Joins the other processes of this launch.

    device: "cpu" or "cuda": the device of the tensors to exchange (torch.distributed then takes gloo or NCCL; Horovod
    decides for each tensor). Equal on all ranks.
    comm_timeout_s: seconds that a collective may take before it counts as hung; 0: no limit.
    start_timeout_s: seconds in which all ranks must join, over torch.distributed. (horovodrun has its own
    --start-timeout.)
    network_interface: the network interface to use, where hosts have several.

    Raises ValueError for an incomplete launch environment; StartError if ranks do not find each other or have different
    kinds of device.
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
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise RefusedByAll(
                "horovodrun's elastic mode (--min-np, --max-np, --host-discovery-script) is not supported; start "
                "`torchrun --nnodes=1:2 --max-restarts=100 ...` on each host, with one --models-root that all of them "
                'see (docs/reliability.md, "Hosts that come and go")'
            )
        try:
            from partial_fc.comm.horovod import HorovodWorld
        except ModuleNotFoundError as error:
            raise StartError(f"{launch.launcher} needs Horovod here ({error}); or start through torchrun") from None
        world = HorovodWorld(launch, device, comm_timeout_s)
    elif launch.backend == "torch":
        from partial_fc.comm.torch_dist import TorchWorld

        world = TorchWorld(launch, device, comm_timeout_s, start_timeout_s)
    else:
        unused(launch)
        world = SingleWorld()
    world.watch(comm_timeout_s, network_interface)
    return world


def all_gather_json(value: Any, world: World, name: str) -> list[Any]:
    """Returns the values of all ranks, by rank; each must be valid JSON. A collective."""
    import torch

    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    size_W = world.all_gather(torch.tensor([len(text)]), name=f"{name}/size").tolist()
    texts = world.start_all_gather(text, size_W, name=name).wait()
    return [json.loads(bytes(part.tolist())) for part in texts.split(size_W)]


def all_or_raise(act: Callable[[], T], world: World, name: str, what: str = "") -> T:
    """Returns what act() returns, if it succeeds on all ranks. Raises ValueError, on all ranks, with the first one that
    fails (ValueError, OSError) and its error. what: between the two. A collective."""
    done, problem = None, None
    try:
        done = act()
    except (ValueError, OSError) as error:
        problem = error
    problem_W = all_gather_json(describe(problem) if problem else None, world, name)
    for rank, text in enumerate(problem_W):
        if text is not None:
            said = f"{what}: {text}"
            raise ValueError(f"rank {rank}{said}" if world.size > 1 else said.lstrip(": ")) from problem
    return done  # type: ignore[return-value]


def all_or_none(act: Callable[[], T], world: World, name: str) -> tuple[T | None, str]:
    """Returns (what act() returns, "") if it succeeds on all ranks, else (None, the first error, with its rank), on all
    alike. act may have collectives: before each the ranks exchange a number, and none waits for one that has failed.
    Raises CollectiveError: what the backend gives up cannot be told. A collective."""
    done, problem, world.contained = None, None, name
    try:
        done = act()
        world.tell()
    except CollectiveError:
        raise
    except OtherRankFailed:
        problem = ""
    except Exception as error:
        problem = describe(error) or type(error).__name__
        with suppress(OtherRankFailed):
            world.tell(failed=True)
    finally:
        world.contained = ""
    if problem is None:
        return done, ""
    problem_W = all_gather_json(problem, world, f"{name}/problem")
    rank = next(rank for rank, text in enumerate(problem_W) if text)
    return None, f"rank {rank}: {problem_W[rank]}" if world.size > 1 else problem


def from_process_group(group: "ProcessGroup | None" = None) -> World:
    """Returns a World of a torch.distributed group that the program has made; None: all processes.

    A group of its own (`torch.distributed.new_group()`) keeps these collectives apart from the caller's. Its timeout is
    the caller's, too; `world.watch` names the ranks that are missing, if called.
    """
    from partial_fc.comm.torch_dist import GroupWorld

    return GroupWorld(group)
