"""The flag groups that all recipes share: how a run is started (launch.py; by hand on several hosts: rendezvous.py),
and how it trains (training.py)."""

from tyro.conf import OmitArgPrefixes as Flags

from partial_fc.flags.launch import LaunchFlags
from partial_fc.flags.rendezvous import RendezvousFlags
from partial_fc.flags.training import (
    ExchangeFlags,
    GuardFlags,
    OptimFlags,
    RunFlags,
    ScheduleFlags,
    check_least,
    flag,
    flat,
    is_given,
    notes,
    with_defaults,
)

__all__ = [
    "ExchangeFlags",
    "Flags",
    "GuardFlags",
    "LaunchFlags",
    "OptimFlags",
    "RendezvousFlags",
    "RunFlags",
    "ScheduleFlags",
    "check_least",
    "flag",
    "flat",
    "is_given",
    "notes",
    "with_defaults",
]
