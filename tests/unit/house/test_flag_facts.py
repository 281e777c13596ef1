"""Facts about flags stand at their fields."""

import json
from dataclasses import dataclass
from typing import Annotated

import pytest

from partial_fc import flags
from partial_fc.flags.facts import Basic, Before, Counts, In, Makes, MayChange, Refused, may_change, one
from partial_fc.train.begin.differences import compare


@may_change
@dataclass(frozen=True, kw_only=True)
class Where:
    """How it is trained."""

    threads: Annotated[int, In(1)] = 2
    seed: Annotated[int, Counts] = 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """A recipe's."""

    where: flags.Flags[Where] = Where()
    classes: Annotated[int | None, In("[2, 9]"), Basic, Refused("these are others")] = 3
    rates: Annotated[tuple[float, ...], In("(0, 1]")] = (0.5,)
    kind: Annotated[str, Makes("network")] = "r18"
    quota: Annotated[str, Before("old")] = "new"
    place: Annotated[str, MayChange] = "here"
    level: Annotated[int, Refused("it is low", lambda then, now: now["level"] < then["level"])] = 1

    def __post_init__(self) -> None:
        flags.check_numbers(self)
        flags.check_numbers(self.where)


def test_facts_are_found_by_the_names_of_flags():
    found = flags.facts(Config)
    assert one(found["threads"], In) == In(1)
    assert MayChange in found["threads"]
    assert MayChange not in found["seed"]
    assert flags.basic(Config) == ("classes",)


@pytest.mark.parametrize(
    ("values", "says"),
    [({"classes": 10}, "--classes is 10"), ({"rates": (0.5, 0.0)}, "--rates is 0.0"), ({"classes": None}, "")],
)
def test_a_number_is_in_its_fields_range(values, says):
    if not says:
        Config(**values)
        return
    with pytest.raises(ValueError, match=says):
        Config(**values)


@pytest.mark.parametrize(
    ("change", "refused", "allowed"),
    [
        ({"threads": 3}, "", ""),
        ({"place": "there"}, "", ""),
        ({"seed": 1}, "", "--seed 0, this run has 1"),
        ({"classes": 4}, "--classes 3, this run has 4: these are others", ""),
        ({"level": 0}, "--level 1, this run has 0: it is low", ""),
        ({"level": 2}, "", "--level 1, this run has 2"),
    ],
)
def test_what_a_resumed_run_may_change(change, refused, allowed):
    values = flags.flat(Config())
    manifest = {"recipe": "mine", "contract": {}, "configuration": json.loads(json.dumps(values))}
    found = compare(manifest, "mine", {}, values | change, flags.facts(Config))
    assert (found.refused, found.allowed) == ([refused] if refused else [], [allowed] if allowed else [])


def test_the_contract_names_its_flag():
    values = flags.flat(Config())
    manifest = {"recipe": "mine", "contract": {"network": "r18"}, "configuration": json.loads(json.dumps(values))}
    (refused,) = compare(manifest, "mine", {"network": "r50"}, values | {"kind": "r50"}, flags.facts(Config)).refused
    assert refused.startswith("--kind r18, this run has r50")


def test_a_run_from_before_a_flag_did_without_it():
    values = flags.flat(Config())
    then = {name: value for name, value in values.items() if name != "quota"}
    manifest = {"recipe": "mine", "configuration": json.loads(json.dumps(then))}
    assert compare(manifest, "mine", {}, values, flags.facts(Config)).allowed == ["--quota old, this run has new"]
