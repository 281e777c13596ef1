"""A verb that runs on all ranks, by any launcher: `horovodrun -np 8 partial-fc evaluate ...`, or `--gpus 8`."""

import signal
from collections.abc import Callable

import torch
from safetensors import SafetensorError

from partial_fc import comm, errors
from partial_fc.comm import World
from partial_fc.comm.device import join
from partial_fc.flags import LaunchFlags
from partial_fc.verbs.train import exit_now


def on_ranks(program: str, launch: LaunchFlags, work: Callable[[World, torch.device], None]) -> None:
    """Starts the processes of the flags, or joins a launcher's, and calls `work` in each; with several, each ends with
    its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a broken connection is an error to report, not the end
    world, device = join(launch)
    if world.size == 1:
        work(world, device)
        return
    status = 0
    try:
        work(world, device)
        world.close()
    except (ValueError, OSError, SafetensorError, comm.CollectiveError) as error:
        errors.report(program, error)
        comm.report_failure(error)
        status = 1
    except KeyboardInterrupt as error:
        comm.report_failure(error)
        status = 130
    exit_now(status)
