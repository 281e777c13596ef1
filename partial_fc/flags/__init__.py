"""The flag groups that all recipes share: how a run is started (launch.py),
and how it trains (training.py). facts.py has the ranges of numbers, command_line.py reads a command line."""

from tyro.conf import OmitArgPrefixes as Flags

from partial_fc.flags.command_line import near, parse, told_as_usage, trainer
from partial_fc.flags.facts import basic, check_numbers, facts, flag, switch
from partial_fc.flags.head import HeadFlags
from partial_fc.flags.launch import LaunchFlags
from partial_fc.flags.training import (
    NO_CHECKPOINT,
    ExchangeFlags,
    GuardFlags,
    OptimFlags,
    RunFlags,
    ScheduleFlags,
    flat,
    is_given,
    notes,
    replaced,
    with_defaults,
)
