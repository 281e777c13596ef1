"""Elastic runs, under `horovodrun --min-np N --host-discovery-script FILE`. Recipes need only `run`."""

from partial_fc.comm.elastic.membership import Evicted, HostsChanged, Member, active, member, mismatched_ranks, run
