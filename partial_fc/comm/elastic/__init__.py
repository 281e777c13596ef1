"""Ranks that come and go under `horovodrun --min-np N --host-discovery-script FILE`; recipes need `run` alone."""

from partial_fc.comm.elastic.membership import (
    MOST_IN_VAIN,
    HostsChanged,
    Member,
    Removed,
    active,
    member,
    run,
    strangers,
)

__all__ = ["MOST_IN_VAIN", "HostsChanged", "Member", "Removed", "active", "member", "run", "strangers"]
