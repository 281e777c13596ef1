"""Ranks that come and go under `horovodrun --min-np N --host-discovery-script FILE`; recipes need `run` alone."""

from partial_fc.comm.elastic.membership import (
    MAX_LOSSES_WITHOUT_PROGRESS,
    Evicted,
    HostsChanged,
    Member,
    active,
    member,
    mismatched_ranks,
    run,
)

__all__ = [
    "MAX_LOSSES_WITHOUT_PROGRESS",
    "Evicted",
    "HostsChanged",
    "Member",
    "active",
    "member",
    "mismatched_ranks",
    "run",
]
