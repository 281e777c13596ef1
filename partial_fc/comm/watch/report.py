"""The text of a report on a collective that hangs or fails, from the ranks' states. Has no input or output."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINES = 16  # with a line each; a thousand missing ranks have one cause
# What a rank does with respect to the reported collective -> (how its line begins, what to check: that of the first
# entry here that fits any rank).
_DOINGS = {
    "elsewhere": (
        "elsewhere",
        "the ranks took different paths through the program: a condition (a flag, a rank number, a data set's "
        "length) that is not the same on all of them",
    ),
    "ended": ("missing", "the output of {ranks}; dmesg of its host (killed for its memory?)"),
    "failed": ("failed too", "the output of {ranks}; dmesg of its host (killed for its memory?)"),
    "silent": ("missing", "the host and the network of {ranks}; the state of its process (ps, py-spy dump)"),
    "late": (
        "missing",
        "the Python stacks of {ranks} in its log: slow storage, a long evaluation or checkpoint? If that is meant to "
        "take so long, give a longer --comm-timeout",
    ),
    "unknown": ("unknown", "the ranks that never reached the store; give --network-interface if hosts have several"),
    "in it": (
        "",
        "every rank has called it, so the transfer is stuck: the network between the hosts (firewall, "
        "--network-interface), or tensors of different sizes on different ranks",
    ),
}


@dataclass
class RankState:
    """The state of a rank, as it reports it."""

    rank: int
    host: str = ""
    process: int = 0
    namespace: str = ""  # of the process's number
    step: int = 0  # world.step
    num_started: int = 0  # collectives since the start
    last: str = ""  # the collective that was started last
    waits_for: str = ""  # the collective that it waits for; "": for none
    waited_s: float = 0.0
    started: dict[str, int] = field(default_factory=dict)  # the number of collectives, by name
    failed: str = ""  # a collective that its backend gave up
    code: str = ""  # the innermost lines of Python that the main thread is in
    goodbye: str = ""  # why it left
    at_s: float = 0.0  # when it was written, since the world began


@dataclass
class PeerState:
    """What is known of a rank."""

    rank: int
    state: RankState | None = None  # the store's newest; None: it did not reach the store
    age_s: float = 0.0  # of that
    answered: bool = False
    has_ended: bool = False  # its process; known of this host's

    @property
    def is_known(self) -> bool:
        """Returns whether no more is to be learned of it."""
        return self.answered or self.has_ended or (self.state is not None and bool(self.state.goodbye))


def report(head: str, name: str, nth: int, peers: Sequence[PeerState] | None) -> str:
    """Returns the head, and below it the ranks that are not in the nth collective of that name, where they are, and
    what to check. peers: None if the store, and so rank 0, does not answer."""
    if peers is None:
        return (
            f"{head}\n"
            "  missing: rank 0, whose process (or its torchrun) keeps the store of the run and does not answer: it has "
            "ended, is stopped, or its host cannot be reached\n"
            "  nothing is known of the other ranks\n"
            "  what to check: the output of rank 0 and its host (dmesg: killed for its memory?)"
        )
    lines: list[str] = []
    ranks: dict[str, list[int]] = defaultdict(list)
    for peer in peers:
        doing, words = _about(name, nth, peer)
        ranks[doing].append(peer.rank)
        if doing != "in it":
            state = peer.state
            where = f" (host {state.host}, process {state.process})" if state and state.host else ""
            lines.append(f"{_DOINGS[doing][0]}: rank {peer.rank}{where}: {words}")
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more ranks"]
    if ranks["in it"]:
        lines.append(f"waiting in it: {ranks_in_words(ranks['in it'])}")
    doing = next(doing for doing in _DOINGS if ranks[doing])
    advice = _DOINGS[doing][1].format(ranks=ranks_in_words(ranks[doing]))
    return "\n  ".join([head, *lines, f"what to check: {advice}"])


def _about(name: str, nth: int, peer: PeerState) -> tuple[str, str]:
    """Returns what the rank does, and a description of it."""
    state = peer.state
    if state is None:
        return "unknown", "has never reached the store of the run, so nothing is known of it"
    position = f"step {state.step}, " + (
        f"last collective {state.last}, number {state.num_started}" if state.last else "no collective started"
    )
    known = f"Last known: {position}."
    if state.failed:
        ended = ", and it has ended" if state.goodbye or peer.has_ended else ""
        return "failed", f"its backend gave up collective {state.failed}{ended}"
    if state.goodbye:
        return "ended", f"left {peer.age_s:.0f} s ago ({state.goodbye}). {known}"
    if peer.has_ended:
        return "ended", (
            f"no longer there: its process ended. Its last sign of life was {peer.age_s:.0f} s ago. {known}"
        )
    if not peer.answered:
        return "silent", (
            f"no sign of life for {peer.age_s:.0f} s: its process is stopped or was killed, its host cannot be "
            f"reached, or its Python is held up in a long call. {known}"
        )
    if state.started.get(name, 0) >= nth:
        return "in it", ""
    if state.waits_for and state.waits_for != name:
        return "elsewhere", (
            f"has not started it and waits in {state.waits_for} instead, for {state.waited_s:.0f} s. "
            f"Step {state.step}; {state.num_started} collectives started. In {state.code}"
        )
    return "late", f"has not started it. It is in {position}, in {state.code}"


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
