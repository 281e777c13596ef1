"""One schedule: hosts, a job on them, and what befalls them, all of it from a seed."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partial_fc.comm import CollectiveError, StartError
from partial_fc.train.run import run_in_worlds
from tests.simulation import product
from tests.simulation.clock import Clock
from tests.simulation.cluster import Cluster, Host, Name, Process
from tests.simulation.driver import Driver
from tests.simulation.faults import Fault, befall, draw
from tests.simulation.job import NUM_SAMPLES, ROOT, Config, Recipe, config_of
from tests.simulation.oracle import Oracle, check

_BEFORE_S, _PAUSE_S = 60.0, 10.0


@dataclass
class Plan:
    """What the seed says."""

    seed: int
    hosts: list[Host]
    config: Config
    step_s: float
    slow_s: float
    stale: float
    disk_waits: bool
    disk_s: float
    faults: list[Fault]
    # How long after the last fault the run may take.
    recovers_s: float = 600.0

    @classmethod
    def of(cls, seed: int) -> "Plan":
        chance = random.Random(seed)
        hosts = [Host(Name(name), chance.choice((1, 1, 2))) for name in "abc"[: chance.choice((2, 2, 3))]]
        for host in hosts[1:]:
            host.is_listed = chance.random() < 0.9
        for host in hosts:
            host.starts_s = (0.3, chance.choice((1.0, 1.0, 3.0, 6.0, 16.0)))
        max_steps = chance.choice((None, chance.randint(15, 40)))
        config = config_of(
            max_steps,
            chance.choice((0.5, 1.0, 1.7)),
            chance.choice((0, 2, 3, 4, 5, 8, 12)),
            chance.choice((0, 3, 6, 11)),
        )
        step_s = chance.choice((0.1, 0.3, 0.8))
        return cls(
            seed,
            hosts,
            config,
            step_s=step_s,
            slow_s=chance.choice((0.0, 0.0, 0.3, 2.0)),
            stale=chance.choice((0.0, 0.0, 0.1)),
            disk_waits=chance.random() < 0.5,
            disk_s=chance.choice((0.004, 0.004, 0.3)),
            faults=draw(chance, step_s),
        )


@dataclass
class Outcome:
    """How it went."""

    seed: int
    problem: BaseException | None
    num_worlds: int
    num_attempts: int
    seconds: float  # simulated
    num_events: int


def simulate(
    plan: Plan, tell: Callable[[str], None] = lambda line: None, more: Iterable[product.Replacement] = ()
) -> Outcome:
    """Runs the schedule of a plan. What must never be is the outcome's problem. more: see `product.simulated`."""
    last = sum(fault.at_s + fault.lasts_s for fault in plan.faults)
    current: list[Process | None] = [None]

    def switch(process: Process | None) -> None:
        product.switch(current[0], process)
        current[0] = process

    clock = Clock(plan.seed, limit_s=last + _BEFORE_S + plan.recovers_s, switch=switch)
    cluster = Cluster(clock, plan.hosts, slow_s=plan.slow_s, disk_waits=plan.disk_waits, tell=tell)
    cluster.stale_answers = plan.stale
    cluster.disk.most_s = plan.disk_s
    oracle = cluster.oracle = Oracle(cluster, NUM_SAMPLES)
    recipe = Recipe(cluster, plan.step_s)
    attempts = 0

    def train(process: Process) -> int:
        try:
            return run_in_worlds("simulated", plan.config, [], recipe.train_here)
        except (ValueError, OSError, CollectiveError, StartError) as error:
            cluster.trace(f"  ends: {error!r}")
            oracle.refused(error)
            return 1

    def job() -> None:
        nonlocal attempts
        for fault in plan.faults:
            befall(cluster, fault)
        most = sum(host.slots for host in plan.hosts)
        while oracle.finished is None:
            attempts += 1
            cluster.trace(f"horovodrun: start number {attempts}")
            driver = Driver(cluster, train, 1, most)
            driver.run()
            check(clock.now < last + _BEFORE_S + plan.recovers_s, "no end in sight")
            clock.sleep(_PAUSE_S)
        schedule = plan.config.schedule
        oracle.check_end(ROOT, schedule.max_steps, 0.0 if schedule.max_steps else schedule.epochs * NUM_SAMPLES)

    problem: BaseException | None = None
    with product.simulated(cluster, recipe, more):
        try:
            clock.run(job)
        except Exception as error:  # whatever it is, it is what was looked for
            problem = error
    return Outcome(plan.seed, problem, oracle.num_worlds, attempts, clock.now, clock.num_events)
