"""What of a head is saved and loaded, besides the tensors of its rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partial_fc.head.partial_fc import PartialFC


def identity(head: "PartialFC") -> dict[str, Any]:
    """What has to be equal in a head that loads a state."""
    return {
        "num_classes": head.num_classes,
        "classes": [head.shard.start, head.shard.stop],
        "embedding_size": head.embedding_size,
        "sub_centres": head.sub_centres,
    }


def check_fits(head: "PartialFC", state: dict[str, Any]) -> None:
    """Raises ValueError for a `state_dict` of another range of classes, or another head's."""
    for name, expected in identity(head).items():
        if state.get(name) != expected:
            raise ValueError(
                f"{head.world}: the state has {name} {state.get(name)}, this head {expected}: each rank loads what "
                "it saved, with as many ranks as saved it; partial_fc.checkpoint loads with any number"
            )
    if (head.hard_negatives is None) != (not state["hard_negatives"]):
        raise ValueError("the state is that of a head with hard negatives, or this head has them: not of both")


def facts(head: "PartialFC") -> dict[str, Any]:
    """See `PartialFC.facts`."""
    return {
        "num_steps": head.num_steps,
        "row_seed": head.store.seed,
        "margin": head.margin_state,
        "schedule": head.store.schedule_state(),
    }


def load_facts(head: "PartialFC", facts: dict[str, Any]) -> None:
    """See `PartialFC.load_facts`."""
    head.store.seed = facts["row_seed"]  # rows that no step has touched yet are made from it
    head.store.load_schedule_state(facts["schedule"])
    same = facts["margin"].keys() == head.margin_state.keys()
    head.margin_state = dict(facts["margin"]) if same else head.margin.state()
    head.num_steps = facts["num_steps"]
