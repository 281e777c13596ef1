"""The checkpoint that a run starts from: that of --resume DIR, or with --resume auto the newest one of this run that is
valid on all ranks. Without one it starts with what the recipe has built, and --start-centres (begin/start_centres.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partial_fc import checkpoint, errors, flags
from partial_fc.checkpoint.class_names import check_class_names
from partial_fc.checkpoint.consistency import check_replicas, newest_common, open_checkpoint
from partial_fc.checkpoint.folders import step_of
from partial_fc.checkpoint.lock import FolderLock
from partial_fc.checkpoint.recovery import go_back_to, latest_valid
from partial_fc.comm import all_gather_json
from partial_fc.comm.launch.restarts import furthest_step
from partial_fc.data import Source
from partial_fc.data.order import Order
from partial_fc.data.sample import identity
from partial_fc.flags.facts import Kept, Makes, MayChange, Refused, one
from partial_fc.head import check_head
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.context import Context
from partial_fc.train.job import Head, RunState

# Parts of the contract about a network's use; the flags that they depend on may change.
_OF_USE = ("flip",)


@dataclass
class Differences:
    """The differences from the run that this one resumes, by flag. refused: makes resuming impossible; allowed:
    possible, but not the same run; kept: the checkpoint's values, which the run takes over."""

    refused: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def check(self, folder: object) -> None:
        """Raises ValueError if any is refused."""
        if self.refused:
            raise errors.RefusedByAll(
                f"{folder} was trained with {'; with '.join(self.refused)}. Resume with the same flags, or "
                "start from scratch with --models-root NEW"
            )


@dataclass
class Start:
    """Where a run starts. length_before: --epochs and --max-steps of the run that it resumes."""

    state: RunState = field(default_factory=RunState)
    differences: Differences = field(default_factory=Differences)
    length_before: dict[str, Any] = field(default_factory=dict)


def resume(run: Context, backbone: TorchBackbone, head: Head, source: Source | None = None) -> Start | None:
    """Loads the checkpoint that the run starts from into backbone and head; None: there is none. source: its class
    names must be those of the checkpoint. A collective. Raises ValueError, on all ranks, for the state of another
    recipe, network or data."""
    check_head(head)
    found, differences = _checkpoint(run, backbone, head, source)
    if found is None:
        return None
    _load(run, found, backbone, head)
    run.logger.info(f"resumed from {found.folder}")
    # Hosts' markers may differ by the last evaluation.
    best = {key: found.manifest.get(key) for key in ("best", "best_score")}
    manifest = found.manifest | all_gather_json(best, run.world, "resume/best")[0]
    then = manifest.get("configuration", {})
    length_before = {name: then[name] for name in ("epochs", "max_steps") if name in then and "epochs" in then}
    state = RunState(
        step=found.step,
        position=_position(found),
        num_overflows=manifest.get("num_overflows", 0),
        left_out=[(begin, end) for begin, end in manifest.get("left_out", [])],
        best={name: score for name, score in (manifest.get("best") or {}).items() if score is not None},
        best_score=manifest.get("best_score") or 0.0,
        data=manifest.get("data"),
    )
    return Start(state, differences, length_before)


def begin_epoch_anew(run: Context, start: RunState, order: Order, source: Source) -> dict[str, int]:
    """Returns the identity of the data, of rank 0's copy, for the checkpoints. If the checkpoint has another, moves the
    position to the beginning of the next epoch, which has each sample of now once. A collective."""
    data = all_gather_json(identity(source) if run.world.rank == 0 else None, run.world, "resume/data")[0]
    if start.data not in (None, data):
        before, samples = start.position, order.num_samples
        start.position = -(-before // samples) * samples
        if start.position > before:
            start.left_out.append((before, start.position))
        run.note(
            f"the data has changed ({start.data.get('samples')} samples then, {data['samples']} now): a new epoch "
            "begins (docs/reliability.md)"
        )
    return data


def restore(run: Context, backbone: TorchBackbone, head: Head, saver: checkpoint.Saver) -> tuple[int, int] | None:
    """Restores the newest valid checkpoint; returns (step, position), None if there is none. A collective."""
    saver.drain()
    given = _given(run)
    found = latest_valid(run.config.run.checkpoints, run.world, _lock(run), _step_in(given), given)
    found = found or open_checkpoint(given, run.world)  # older ones are another run's
    if found is None:
        return None
    _load(run, found, backbone, head)
    return found.step, _position(found)


def _checkpoint(
    run: Context, backbone: TorchBackbone, head: Head, source: Source | None
) -> tuple[checkpoint.Checkpoint | None, Differences]:
    """Returns the checkpoint to start from, valid, of this recipe and network and with the classes of this source; and
    the differences from its run. None: there is none. A collective."""
    asked, root, world, lock = run.config.run.resume, run.config.run.checkpoints, run.world, _lock(run)
    given = _given(run)
    # After a restart the run's own checkpoints come before the one that it began from.
    recovers = asked in ("auto", "same") or any(all_gather_json(furthest_step(), world, "resume/restart"))
    found = latest_valid(root, world, lock, _step_in(given), given) if recovers else None
    found = found or open_checkpoint(given, world)
    newest = None if recovers else newest_common(root, world)
    goes_back = newest is not None and (found.step if found else -1) < step_of(newest)
    if newest and goes_back:
        inside = found is not None and found.folder.resolve().parent == root.resolve()
        if not all(all_gather_json(inside, world, "resume/inside")):
            # Checkpoints are found by their step: those of the other run would count as the newest.
            raise errors.RefusedByAll(
                f"{newest} is ahead of where this run would start (--resume {asked}); use another --models-root, or "
                "remove the checkpoints that are not wanted"
            )
    differences = Differences()
    if found is not None:
        same_recipe = found.manifest.get("recipe") == run.recipe  # of another recipe `_compare` reports it
        for note in check_class_names(found, source) if source is not None and same_recipe else ():
            run.note(note)
        differences = _compare(run, found, backbone, head)
        if asked == "same" and differences.allowed:
            raise errors.RefusedByAll(
                f"{found.folder} is of another run (--resume same): it was trained with "
                f"{'; with '.join(differences.allowed)}. Use another --models-root, or resume from it with --resume "
                "auto"
            )
        found.check_has_backbone()
        if goes_back:
            go_back_to(found, root, world, lock)
    return found, differences


def _given(run: Context) -> Path | None:
    """Returns the checkpoint that the user has named."""
    asked = run.config.run.resume
    return None if asked in flags.NO_CHECKPOINT else Path(asked)


def _step_in(folder: Path | None) -> int:
    """Returns the step in the folder's name; -1 if there is none. The same on all ranks."""
    return step_of(folder) if folder and folder.name.removeprefix("step-").isdecimal() else -1


def _lock(run: Context) -> FolderLock | None:
    """Returns this rank's lock of the checkpoints' folder, if it is the one that holds it."""
    return run.folders.locks.get(run.config.run.checkpoints)


def _compare(run: Context, found: checkpoint.Checkpoint, backbone: TorchBackbone, head: Head) -> Differences:
    """Returns the differences from the saved run, noting those allowed. Raises ValueError for others."""
    values = flags.flat(run.config)
    table = head.tables().get("")
    num_classes = table.num_classes if table else None
    differences = compare(
        found.manifest, run.recipe, backbone.contract, values, flags.facts(type(run.config)), num_classes
    )
    differences.check(found.folder)
    for change in differences.allowed:
        run.note(f"{found.folder.name} was trained with {change}: not the same run")
    return differences


def _load(run: Context, found: checkpoint.Checkpoint, backbone: TorchBackbone, head: Head) -> None:
    """Loads the checkpoint; state that it lacks is initialised."""
    notes = backbone.load(found)
    check_replicas(backbone.replicated(), run.world)
    for note in (*found.load_head(head), *notes):
        run.note(note)


def _position(found: checkpoint.Checkpoint) -> int:
    """Returns the samples consumed by all ranks."""
    if "position" not in found.manifest:
        raise ValueError(f"{found.folder}: manifest.json has no position in the data")
    return found.manifest["position"]


def compare(
    manifest: Mapping[str, Any],
    recipe: str,
    contract: Mapping[str, str],
    values: Mapping[str, Any],
    facts: Mapping[str, tuple[object, ...]],
    num_classes: int | None = None,
) -> Differences:
    """Returns the differences between a checkpoint and this run.

    manifest: the checkpoint's
    recipe, contract, values: this run's, the contract of the network and the values of all flags
    facts: what flags/facts.py says of these flags
    num_classes: of this run's head, if that has class centres
    """
    found, then = Differences(), manifest.get("configuration", {})
    if (then_recipe := manifest.get("recipe", recipe)) != recipe:
        return Differences([f"recipe {then_recipe}, this is recipe {recipe}"])
    network = manifest.get("contract", {})
    reported: set[str] = set()
    for name, is_now in contract.items():
        if name in network and network[name] != is_now and name not in _OF_USE:
            made_by = (flag for flag, marks in facts.items() if Makes(name) in marks)
            by = name if name in then else next(made_by, "")
            reported.add(by)
            what = flags.flag(by) if by in then else f"another {name} of the network:"
            found.refused.append(f"{what} {network[name]}, this run has {is_now}: its weights do not fit")
    stored = manifest.get("tables", {}).get("", {}).get("num_classes")
    if None not in (num_classes, stored) and stored != num_classes:
        reported.add("num_classes")
        found.refused.append(
            f"--num-classes {stored}, this run has {num_classes}: these are other classes (`partial-fc checkpoint "
            "classes` adds and removes them)"
        )
    for name, value in values.items():
        marks = facts.get(name, ())
        # As in JSON.
        now = [str(one) if isinstance(one, Path) else one for one in value] if isinstance(value, tuple) else value
        before = then.get(name, now)
        endless = isinstance(now, float) and not math.isfinite(now) and before is None  # which JSON lacks
        if name in reported or MayChange in marks or str(before) == str(now) or endless:
            continue
        change = f"{flags.flag(name)} {before}, this run has {now}"
        if type(before) is bool and type(now) is bool:  # as typed on the command line
            change = f"{flags.switch(name, before)}, this run has {flags.switch(name, now)}"
        refused, kept = one(marks, Refused), one(marks, Kept)
        if kept and before == kept.value:
            found.kept[name] = before
        elif refused and None not in (before, now) and refused.when(then, values):
            found.refused.append(f"{change}: {refused.why}")
        else:
            found.allowed.append(change)
    return found
