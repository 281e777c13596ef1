"""The words for a collective that hangs or fails, from what the ranks say of themselves. No input or output here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_LINES = 16  # ranks told about one by one; a thousand missing ranks have one cause


@dataclass
class Place:
    """Where a rank is, in its own words."""

    rank: int
    host: str = ""
    process: int = 0
    step: int = 0  # world.step
    num_started: int = 0  # collectives since the start
    last: str = ""  # the collective that was started last
    waits_for: str = ""  # the collective that it waits for; "": for none
    waited_s: float = 0.0
    # the answer to a question about one collective
    has_started: bool | None = None
    waits_in_it: bool = False
    number: int = 0  # its place among this rank's collectives, where known
    failed: str = ""  # a collective that its backend gave up
    code: str = ""  # the innermost lines of Python that the main thread is in


@dataclass
class Question:
    """A rank asks all the others about its collective."""

    rank: int
    name: str
    nth: int  # call of that name, from 1
    number: int  # among all collectives of that rank, from 1
    step: int
    waited_s: float
    hangs: bool  # else it has failed
    # by order: torch.distributed matches collectives so, Horovod by name
    ordered: bool = False


@dataclass
class Seen:
    """A rank as the status board of rank 0 sees it. Ages by the board's own clock."""

    rank: int
    # never: did not reach the board; left: said good-bye; lost: the connection broke without that
    link: Literal["open", "left", "lost", "never"]
    age_s: float = 0.0  # of its last message, or of the end of its connection
    answered: bool = False
    place: Place | None = None  # the newest one
    farewell: str = ""  # what it said when it left


def hang_report(question: Question, seen: Sequence[Seen] | None, why_rank_0_left: str = "") -> str:
    """Which collective, which step, which ranks are missing and where they are, what to look at.

    seen: None where the board does not answer, which is as much as to say that rank 0 does not. why_rank_0_left: what
    it said when it did, if so.
    """
    head = (
        f"collective {question.name} has not finished after {question.waited_s:.0f} s. Step {question.step}; "
        f"call {question.nth} of that name, collective number {question.number} of rank {question.rank}"
    )
    if seen is None:
        return f"{head}\n{_no_board(why_rank_0_left)}"
    lines, waiting = _sorted_out(question, seen)
    if waiting:
        lines.append(f"waiting in it: {ranks_in_words(waiting)}")
    return "\n  ".join([head, *lines, f"what to look at: {_advice(question, seen)}"])


def failure_report(
    question: Question,
    seen: Sequence[Seen] | None,
    what_the_backend_says: str,
    why_rank_0_left: str = "",
) -> str:
    """As `hang_report`, of a collective that the backend gave up."""
    head = (
        f"collective {question.name} failed on rank {question.rank}, step {question.step}, call {question.nth} of that "
        f"name: {what_the_backend_says}"
    )
    if seen is None:
        return f"{head}\n{_no_board(why_rank_0_left)}"
    others = [s for s in seen if s.rank != question.rank]
    lines, waiting = _sorted_out(question, others)
    if waiting:
        lines.append(f"waiting in it: {ranks_in_words(waiting)}")
    failed = [s.rank for s in others if s.place and s.place.failed]
    first = [s.rank for s in others if s.rank not in failed and (s.link in ("left", "lost") or _is_silent(s))]
    if first:
        lines.append(f"look first at the output and the host of {ranks_in_words(first)}")
    return "\n  ".join([head, *lines])


def _no_board(why_rank_0_left: str) -> str:
    state = "does not answer: it has ended, is stopped, or its host cannot be reached"
    if why_rank_0_left:
        state = f"has left ({why_rank_0_left})"
    return (
        f"  missing: rank 0, whose process keeps the status board and {state}\n"
        "  nothing is known of the other ranks\n"
        "  what to look at: the output of rank 0 and its host (dmesg: killed for its memory?)"
    )


def _is_silent(s: Seen) -> bool:
    return s.link == "open" and not s.answered


def _is_elsewhere(question: Question, s: Seen) -> bool:
    """Waits in another collective, having never called this one."""
    p = s.place
    return bool(s.answered and p and p.has_started is False and p.waits_for and p.waits_for != question.name)


def _is_out_of_order(question: Question, s: Seen) -> bool:
    p = s.place
    return bool(question.ordered and s.answered and p and p.has_started and p.number and p.number != question.number)


def _sorted_out(question: Question, seen: Sequence[Seen]) -> tuple[list[str], list[int]]:
    """(lines about ranks that do anything else, the ranks that wait in this collective)."""
    told: list[str] = []
    waiting: list[int] = []
    for s in seen:
        words = _about(question, s)
        if words:
            told.append(f"{words[0]}: rank {s.rank}{_where(s.place)}: {words[1]}")
        else:
            waiting.append(s.rank)
    if len(told) > MOST_LINES:
        told = [*told[:MOST_LINES], f"... and {len(told) - MOST_LINES} more ranks"]
    return told, waiting


def _about(question: Question, s: Seen) -> tuple[str, str] | None:
    """(heading, what it does); None: it waits in this collective, as it should."""
    p = s.place
    if s.link == "never":
        return "unknown", "has never reached the status board of rank 0, so nothing is known of it"
    if p and p.failed:
        ended = "" if s.link == "open" else ", and it has ended"
        return "failed too", f"its backend gave up collective {p.failed}{ended}"
    if s.link == "left":
        return "missing", f"has left {s.age_s:.0f} s ago ({s.farewell}). {_last_known(p)}"
    if s.link == "lost":
        return (
            "missing",
            f"no longer there: its process ended, or its host went away, {s.age_s:.0f} s ago. {_last_known(p)}",
        )
    if not s.answered or p is None:
        return (
            "missing",
            f"no sign of life for {s.age_s:.0f} s: its process is stopped, its host cannot be reached, or its Python "
            f"is held up in a long call. {_last_known(p)}",
        )
    if _is_elsewhere(question, s):
        return "elsewhere", (
            f"has not started it and waits in {p.waits_for} instead, for {p.waited_s:.0f} s. Step {p.step}; "
            f"{p.num_started} collectives started. In {p.code}"
        )
    if not p.has_started:
        return "missing", f"has not started it. It is in {_position(p)}, in {p.code}"
    if _is_out_of_order(question, s):
        return "out of order", (
            f"has started it as its collective number {p.number}, not {question.number}: the ranks call collectives in "
            f"different orders. In {p.code}"
        )
    if not p.waits_in_it:
        what = f"waits in {p.waits_for} for {p.waited_s:.0f} s" if p.waits_for else "computes"
        return "started", f"has started it and {what}. Step {p.step}. In {p.code}"
    return None


def _where(p: Place | None) -> str:
    return f" (host {p.host}, process {p.process})" if p and p.host else ""


def _position(p: Place) -> str:
    return f"step {p.step}, " + (
        f"last collective {p.last}, number {p.num_started}" if p.last else "no collective started"
    )


def _last_known(p: Place | None) -> str:
    """Seconds old: places are told every now and then."""
    return f"When it was last heard of: {_position(p)}." if p else "It never said where it was."


def _advice(question: Question, seen: Sequence[Seen]) -> str:
    if any(_is_elsewhere(question, s) or _is_out_of_order(question, s) for s in seen):
        return (
            "the ranks took different paths through the program: a condition (a flag, a rank number, a data set's "
            "length) that is not the same on all of them"
        )
    ended = [s.rank for s in seen if s.link in ("left", "lost")]
    if ended:
        return f"the output of {ranks_in_words(ended)}; dmesg of its host (killed for its memory?)"
    silent = [s.rank for s in seen if _is_silent(s)]
    if silent:
        return f"the host and the network of {ranks_in_words(silent)}; the state of its process (ps, py-spy dump)"
    missing = [s.rank for s in seen if s.answered and s.place and not s.place.has_started]
    if missing:
        return (
            f"the Python stacks of {ranks_in_words(missing)} in its log: slow storage, a long evaluation or "
            "checkpoint? If that is meant to take so long, give a longer --comm-timeout"
        )
    if any(s.link == "never" for s in seen):
        return "the ranks that never reached the status board; give --network-interface if hosts have several"
    return (
        "every rank has called it, so the transfer stands still: the network between the hosts (firewall, "
        "--network-interface), or tensors of different sizes on different ranks"
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ranks 0-2, 5"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"
