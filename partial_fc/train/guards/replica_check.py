"""The check for diverged replicas: backbone and optimizer state must be the same bits on all ranks.

A faulty GPU or memory, a library that adds in another order on one host, or a lost message need not show in the loss,
but from then on the ranks train different models.
"""

from partial_fc.checkpoint import consistency
from partial_fc.train.job import Job


def compare_replicas(job: Job) -> None:
    """Raises ValueError, on all ranks alike, if the backbones have diverged, with the ranks that differ, and the first
    difference. A collective (consistency.compare_replicas)."""
    scaler, step = job.backbone.scaler, job.at.step
    facts = {"loss scale": scaler.state() if scaler else 1.0}
    for table in job.head.tables().values():
        of = f"table {table.name}'s" if table.name else "the head's"
        facts |= {f"{of} {name}": fact for name, fact in table.facts().items() if name in ("num_steps", "margin")}
    facts |= {f"the head's {name}": fact for name, fact in job.head.state().items()}
    found = consistency.compare_replicas({**facts, **job.backbone.replicated()}, job.world, "train/replicas")
    if found:
        last = job.guards.last_equal
        raise ValueError(
            f"step {step}: the replicas have diverged: {found}. The ranks have been training different models since "
            f"some step after {last}, when they were equal: resume from a checkpoint of step {last} or before "
            "(--resume DIR). Usual causes: a faulty GPU or memory (look at its ECC counters, run without that "
            "host), hosts with different processors or versions of libraries. (--desync-every 0 turns this check off)"
        )
    job.guards.last_equal = step
