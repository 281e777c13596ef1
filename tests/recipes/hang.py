"""Launches that go wrong, each in a way of its own.

    horovodrun -np 2 ... python -m tests.recipes.hang "sleeps" 4           as a rank of a launch; 4 s a collective
    python -m tests.recipes.hang FOLDER 4 "sleeps" "rank 0 is stopped"     each way by 3 processes, all at once

All ranks call "t/before" in step 6; in step 7 rank `bad`, the last one unless the way says "rank 0", does something
else before it calls "t/hangs".
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from partial_fc import comm
from tests.running import become_rank
from tests.waiting import free_port

SIZE = 3
PATIENCE_S = 150.0


def sleeps_here() -> None:
    time.sleep(PATIENCE_S)


def main(way: str, timeout_s: float) -> None:
    world = comm.init(comm_timeout_s=timeout_s)
    bad = 0 if way.startswith("rank 0") else world.size - 1
    world.step = 6
    world.all_reduce(torch.ones(3), name="t/before")
    world.step = 7
    for _ in range(2):
        if world.rank == bad:
            misbehave(way.removeprefix("rank 0 "), world, timeout_s)
        world.all_reduce(torch.ones(3), name="t/hangs")
    world.close()
    print(f"rank {world.rank} is through", flush=True)


def misbehave(way: str, world: comm.World, timeout_s: float) -> None:
    match way:
        case "sleeps":
            sleeps_here()
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("record 17 is damaged")
        case "fails":  # as train.py does
            comm.report_failure(ValueError("record 18 is damaged"))
            os._exit(1)
        case "is elsewhere":
            world.broadcast(torch.ones(2), name="t/elsewhere")
        case "is late":
            time.sleep(timeout_s / 2)
        case _:
            raise ValueError(way)


def start_ranks(folder: Path, timeout_s: float, ways: list[str]) -> None:
    """Forks SIZE processes for each way, as torchrun would start them, which end as Python does. The first process
    waits until all have ended or PATIENCE_S are over. Each writes to FOLDER/WAY.RANK; FOLDER/statuses has their
    statuses, None for one that had to be killed."""
    processes: dict[int, tuple[str, int]] = {}
    for way in ways:
        port = free_port()
        for rank in range(SIZE):
            process = os.fork()
            if process == 0:
                become_rank(rank, SIZE, port, str(folder / f"{way}.{rank}"), main, way, timeout_s)
                return
            processes[process] = way, rank
    statuses: dict[str, list[int | None]] = {way: [None] * SIZE for way in ways}
    give_up = time.monotonic() + PATIENCE_S
    while processes and time.monotonic() < give_up:
        for process in list(processes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                way, rank = processes.pop(process)
                statuses[way][rank] = os.waitstatus_to_exitcode(status)
        if len(processes) == sum(way.endswith("is stopped") for way, _ in processes.values()) and all(
            statuses[way].count(None) == 1 for way, _ in processes.values()
        ):
            break  # only those are left that cannot end
        time.sleep(0.05)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    (folder / "statuses").write_text(json.dumps(statuses))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        start_ranks(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1], float(sys.argv[2]))
