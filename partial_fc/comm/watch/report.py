"""The text of a report on a collective that hangs or fails, from the ranks' states. Has no input or output."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_LINES = 16  # with a line each; a thousand missing ranks have one cause
# The rank's activity with respect to the reported collective; its line begins with that, or with _HEADINGS.
Doing = Literal[
    "waiting", "unknown", "failed too", "left", "lost", "silent", "elsewhere", "not started", "out of order", "started"
]
_HEADINGS: dict[Doing, str] = {"left": "missing", "lost": "missing", "silent": "missing", "not started": "missing"}


@dataclass
class RankState:
    """The state of a rank, as it reports it."""

    rank: int
    host: str = ""
    process: int = 0
    step: int = 0  # world.step
    num_started: int = 0  # collectives since the start
    last: str = ""  # the collective that was started last
    waits_for: str = ""  # the collective that it waits for; "": for none
    waited_s: float = 0.0
    # By name, the newest call: its number among those of that name, and among all.
    started: dict[str, list[int]] = field(default_factory=dict)
    in_flight: list[list[Any]] = field(default_factory=list)  # name, number among those of that name
    failed: str = ""  # a collective that its backend gave up
    code: str = ""  # the innermost lines of Python that the main thread is in
    goodbye: str = ""  # why it left
    ended_here: list[int] = field(default_factory=list)  # ranks of its host whose process has ended
    at_s: float = 0.0  # when it was written, since the world began

    def has_started(self, query: "Query") -> bool:
        return self.started.get(query.name, [0])[0] >= query.nth

    def number_of(self, query: "Query") -> int:
        """Returns the call's number among this rank's collectives; 0: not known."""
        nth, number = self.started.get(query.name, [0, 0])
        return number if nth == query.nth else 0


@dataclass
class Query:
    """A rank's question about one of its collectives."""

    rank: int
    name: str
    nth: int  # call of that name, from 1
    number: int  # among all collectives of that rank, from 1
    step: int
    waited_s: float
    ordered: bool = False  # torch.distributed matches collectives by their order, Horovod by name


# never: did not reach the store; left: closed its world; lost: its process ended without that
Link = Literal["open", "left", "lost", "never"]


@dataclass
class PeerState:
    """What the store has of a rank."""

    rank: int
    link: Link
    age_s: float = 0.0  # of its newest state
    answered: bool = False
    state: RankState | None = None  # the newest one


def hang_report(query: Query, peer_states: Sequence[PeerState] | None, why_rank_0_left: str = "") -> str:
    """Returns the report: the collective, the step, the missing ranks and where they are, and what to check.

    peer_states: None if the store, and so rank 0, does not answer. why_rank_0_left: its reason, if it has left.
    """
    head = (
        f"collective {query.name} has not finished after {query.waited_s:.0f} s. Step {query.step}; "
        f"call {query.nth} of that name, collective number {query.number} of rank {query.rank}"
    )
    if peer_states is None:
        return f"{head}\n{_no_server(why_rank_0_left)}"
    lines, ranks = _lines(query, peer_states)
    return "\n  ".join([head, *lines, f"what to check: {_advice(ranks)}"])


def failure_report(
    query: Query, peer_states: Sequence[PeerState] | None, backend_error: str, why_rank_0_left: str = ""
) -> str:
    """Returns the same as `hang_report` for a collective that the backend gave up."""
    head = (
        f"collective {query.name} failed on rank {query.rank}, step {query.step}, call {query.nth} of that "
        f"name: {backend_error}"
    )
    if peer_states is None:
        return f"{head}\n{_no_server(why_rank_0_left)}"
    lines, ranks = _lines(query, [s for s in peer_states if s.rank != query.rank])
    if first := [*ranks["left"], *ranks["lost"], *ranks["silent"]]:
        lines.append(f"check first the output and the host of {ranks_in_words(first)}")
    return "\n  ".join([head, *lines])


def _no_server(why_rank_0_left: str) -> str:
    state = (
        f"has left ({why_rank_0_left})"
        if why_rank_0_left
        else ("does not answer: it has ended, is stopped, or its host cannot be reached")
    )
    return (
        f"  missing: rank 0, whose process (or its torchrun) keeps the store of the run and {state}\n"
        "  nothing is known of the other ranks\n"
        "  what to check: the output of rank 0 and its host (dmesg: killed for its memory?)"
    )


def _lines(query: Query, peer_states: Sequence[PeerState]) -> tuple[list[str], dict[Doing, list[int]]]:
    """Returns (a line for each rank outside this collective, one for those that wait in it; ranks by activity)."""
    lines: list[str] = []
    ranks: dict[Doing, list[int]] = defaultdict(list)
    for s in peer_states:
        doing, words = _about(query, s)
        ranks[doing].append(s.rank)
        if doing != "waiting":
            where = f" (host {s.state.host}, process {s.state.process})" if s.state and s.state.host else ""
            lines.append(f"{_HEADINGS.get(doing, doing)}: rank {s.rank}{where}: {words}")
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more ranks"]
    if ranks["waiting"]:
        lines.append(f"waiting in it: {ranks_in_words(ranks['waiting'])}")
    return lines, ranks


def _about(query: Query, s: PeerState) -> tuple[Doing, str]:
    """Returns the rank's activity, and a description of it."""
    state = s.state
    if s.link == "never":
        return "unknown", "has never reached the store of the run, so nothing is known of it"
    if state and state.failed:
        ended = "" if s.link == "open" else ", and it has ended"
        return "failed too", f"its backend gave up collective {state.failed}{ended}"
    if s.link == "left":
        return "left", f"left {s.age_s:.0f} s ago ({state.goodbye if state else ''}). {_last_known(state)}"
    if s.link == "lost":
        return "lost", (
            f"no longer there: its process ended. Its last sign of life was {s.age_s:.0f} s ago. {_last_known(state)}"
        )
    if not s.answered or state is None:
        return "silent", (
            f"no sign of life for {s.age_s:.0f} s: its process is stopped or was killed, its host cannot be "
            f"reached, or its Python is held up in a long call. {_last_known(state)}"
        )
    if not state.has_started(query) and state.waits_for and state.waits_for != query.name:
        return "elsewhere", (
            f"has not started it and waits in {state.waits_for} instead, for {state.waited_s:.0f} s. "
            f"Step {state.step}; {state.num_started} collectives started. In {state.code}"
        )
    if not state.has_started(query):
        return "not started", f"has not started it. It is in {_position(state)}, in {state.code}"
    number = state.number_of(query)
    if query.ordered and number and number != query.number:
        return "out of order", (
            f"has started it as its collective number {number}, not {query.number}: the ranks call collectives "
            f"in different orders. In {state.code}"
        )
    if [query.name, query.nth] not in state.in_flight:
        what = f"waits in {state.waits_for} for {state.waited_s:.0f} s" if state.waits_for else "computes"
        return "started", f"has started it and {what}. Step {state.step}. In {state.code}"
    return "waiting", ""


def _position(state: RankState) -> str:
    return f"step {state.step}, " + (
        f"last collective {state.last}, number {state.num_started}" if state.last else "no collective started"
    )


def _last_known(state: RankState | None) -> str:
    """Describes the newest state that the store has, possibly seconds old."""
    return f"Last known: {_position(state)}." if state else "It has sent no state."


def _advice(ranks: dict[Doing, list[int]]) -> str:
    if ranks["elsewhere"] or ranks["out of order"]:
        return (
            "the ranks took different paths through the program: a condition (a flag, a rank number, a data set's "
            "length) that is not the same on all of them"
        )
    if ended := [*ranks["failed too"], *ranks["left"], *ranks["lost"]]:
        return f"the output of {ranks_in_words(ended)}; dmesg of its host (killed for its memory?)"
    if silent := ranks["silent"]:
        return f"the host and the network of {ranks_in_words(silent)}; the state of its process (ps, py-spy dump)"
    if missing := ranks["not started"]:
        return (
            f"the Python stacks of {ranks_in_words(missing)} in its log: slow storage, a long evaluation or "
            "checkpoint? If that is meant to take so long, give a longer --comm-timeout"
        )
    if ranks["unknown"]:
        return "the ranks that never reached the store; give --network-interface if hosts have several"
    return (
        "every rank has called it, so the transfer is stuck: the network between the hosts (firewall, "
        "--network-interface), or tensors of different sizes on different ranks"
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Formats rank numbers: "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"
