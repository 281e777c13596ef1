"""How long an elastic job takes to go on when a host is lost, and when it is back, again and again.

python -m benchmarks.hosts.elastic FOLDER --rounds 20 --seed 1          three processes, as root
python -m benchmarks.hosts.elastic FOLDER --processes 1+1 --how kill --num-classes 200000 --embedding-size 512
"""

import argparse
import random
import re
import time
from pathlib import Path

from benchmarks.hosts.two_hosts import TwoHosts, two_hosts
from tests.cluster.elastic_job import Job, kill_all, running, stop
from tests.recipes.conftest import environment

_STEP = r"\bstep \d+/"


def lose_and_take_back(hosts: TwoHosts, job: Job, how: str, nth: int) -> tuple[float, float]:
    """The second host is lost ("kill": all its processes; "cut": the cable, for so long that the first goes on alone;
    "out": taken out of the host file) and comes back: the job's recoveries number nth and nth + 1. Their seconds."""
    if how == "kill":
        kill_all(hosts, 1)
        lost = job.recovered(nth)
    elif how == "out":
        host_file = job.root / "hosts"
        both = host_file.read_text()
        host_file.write_text(both.splitlines(keepends=True)[0])
        lost = job.recovered(nth)
        host_file.write_text(both)
    else:
        with hosts.cut():
            lost = job.recovered(nth)
    return lost[1], job.recovered(nth + 1)[1]


def many_times(given: argparse.Namespace, flags: list[str], limit_s: float = 30.0) -> None:
    """The second host is lost in one way or the other, at any moment, and comes back, again and again; raises
    AssertionError where the first one does not go on within limit_s, or a step is missing at the end."""
    chance = random.Random(given.seed)
    first_host, second_host = map(int, given.processes.split("+"))
    flags = ["--checkpoint-every", "50", *flags]
    with two_hosts() as hosts, running(hosts, environment(), given.root, flags, (first_host, second_host)) as job:
        job.wait_for("step 20/")
        for number in range(given.rounds):
            steps_told = len(re.findall(_STEP, job.printed))
            job.wait_for(_STEP, steps_told + 1)  # or a return would count among the seconds of the next loss
            time.sleep(chance.uniform(0, 5))
            how = chance.choice(given.how)
            lost_s, _ = lose_and_take_back(hosts, job, how, 2 * number + 1)
            lost, back = (job.recovery(2 * number + nth) for nth in (1, 2))
            print(
                f"round {number + 1}, {how}: went on after {lost[1]} s ({lost[2]}); it came back, all went on after "
                f"{back[1]} s ({back[2]})",
                flush=True,
            )
            assert lost_s < limit_s
        stop(hosts, 1, job)
    steps = [int(row.partition(",")[0]) for row in (given.root / "loss.csv").read_text().splitlines()[1:]]
    assert steps == list(range(1, len(steps) + 1))
    print(f"{len(steps)} steps, none missing")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(epilog="Other flags are the job's.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", default="2+1", help="of the first host, and of the second")
    parser.add_argument("--how", nargs="+", choices=("kill", "cut", "out"), default=("kill", "cut"))
    many_times(*parser.parse_known_args())
