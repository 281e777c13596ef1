"""Ranks that come and go under `horovodrun --min-np N --host-discovery-script FILE`. Recipes need `run` alone: it calls
their training again in each new world."""

from partial_fc.comm.elastic.membership import Evicted, HostsChanged, Member, active, member, mismatched_ranks, run

__all__ = ["Evicted", "HostsChanged", "Member", "active", "member", "mismatched_ranks", "run"]
