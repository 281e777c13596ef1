"""Runs schedules, or one of them with all that happens in it.

python -m tests.simulation --seed 17                  one schedule, with its trace
python -m tests.simulation --schedules 10000          as many, from --first on; names those that are wrong
"""

import argparse
import sys
import time
import traceback

from tests.simulation.simulation import Plan, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", allow_abbrev=False)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.schedules)
    if given.seed is not None:
        outcome = simulate(Plan.of(given.seed), print)
        if outcome.problem:
            traceback.print_exception(outcome.problem)
        print(outcome)
        return int(outcome.problem is not None)
    began, used = time.perf_counter(), time.process_time()
    worlds = attempts = 0
    wrong = []
    for seed in seeds:
        outcome = simulate(Plan.of(seed))
        worlds, attempts = worlds + outcome.num_worlds, attempts + outcome.num_attempts
        if outcome.problem:
            wrong.append(seed)
            print(f"seed {seed}: {type(outcome.problem).__name__}: {outcome.problem}", flush=True)
    print(
        f"{given.schedules} schedules from {given.first}, {worlds} worlds, {attempts} starts, "
        f"{time.perf_counter() - began:.1f} s ({time.process_time() - used:.1f} s of CPU); "
        f"{len(wrong)} wrong: {wrong[:50]}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
