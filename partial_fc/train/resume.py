"""What a run goes on from: the newest of what the ranks of an earlier world kept, a checkpoint, or centres alone.

1. the commit that the ranks of the world before have among them (elastic runs), where no newer checkpoint is there;
2. the checkpoint of --resume DIR, or with --resume auto the newest one of this run;
3. the class centres of --head-centres, where the recipe has them, with a fresh backbone;
4. nothing.
"""

from pathlib import Path
from typing import Any

from partial_fc import checkpoint, flags
from partial_fc.checkpoint.class_names import check_class_names
from partial_fc.checkpoint.consistency import check_replicas, newest_common, open_checkpoint
from partial_fc.checkpoint.folders import step_of
from partial_fc.checkpoint.initial_centres import check_whole, load_centres, open_centres
from partial_fc.checkpoint.peer.recover import recover
from partial_fc.comm import elastic
from partial_fc.data import Source
from partial_fc.head import PartialFC
from partial_fc.train.backbone import Stored, TorchBackbone
from partial_fc.train.begin.differences import compare
from partial_fc.train.context import RunContext
from partial_fc.train.job import Head, RunState


def resume(
    run: RunContext,
    backbone: TorchBackbone,
    head: Head,
    source: Source | None = None,
    *,
    head_centres: Path | None = None,
    may_change: tuple[str, ...] = (),
) -> RunState:
    """Gives backbone and head the state that the run starts from. source: its classes must have the names that those of
    the checkpoint have. may_change: the recipe's own flags that do not make another run of this one. A collective.
    Raises ValueError, on all ranks, where the state is of another recipe, network or data."""
    found: Stored | None = None
    if elastic.active():
        found = recover(run.memory, run.world, run.config.run.checkpoints)
    if found is None:
        found = _checkpoint(run, backbone, head, source, head_centres, may_change)
    if found is None:
        return RunState()
    _load(run, found, backbone, head)
    run.logger.info(f"resumed from {found.folder}")
    manifest = found.manifest
    # Recipe mnist of version 0.1 had these among its position.
    old = {} if isinstance(manifest["position"], int) else manifest["position"]
    return RunState(
        step=found.step,
        position=_position(manifest, source),
        num_overflows=manifest.get("num_overflows", old.get("skipped", 0)),
        left_out=[(begin, end) for begin, end in manifest.get("left_out", [])],
        best=manifest.get("best") or ({"test": old["best"]} if old else {}),
        best_score=manifest.get("best_score") or 0.0,
    )


def restore(
    run: RunContext, backbone: TorchBackbone, head: Head, saver: checkpoint.Saver, source: Source | None = None
) -> tuple[int, int] | None:
    """Brings back the newest complete checkpoint of this run, or the one that it started from, while it runs. (Step,
    position in the data); none where there is neither. A collective."""
    saver.finish()
    given = None if run.config.run.resume in ("auto", "never") else Path(run.config.run.resume)
    newest = newest_common(run.config.run.checkpoints, run.world)
    if newest is None or _is_ahead(given, newest):  # what is older there is of another run
        newest = given
    found = open_checkpoint(newest, run.world)
    if found is None:
        return None
    _load(run, found, backbone, head)
    return found.step, _position(found.manifest, source)


def _checkpoint(
    run: RunContext,
    backbone: TorchBackbone,
    head: Head,
    source: Source | None,
    head_centres: Path | None,
    may_change: tuple[str, ...],
) -> checkpoint.Checkpoint | None:
    """The one to start from, whole, of this recipe and network and with the classes of this source. None: there is none
    to be gone on from, and the centres are those of head_centres, if given. A collective."""
    asked, world = run.config.run.resume, run.world
    newest = newest_common(run.config.run.checkpoints, world)
    folder = {"never": None, "auto": newest}.get(asked, Path(asked))
    if newest and run.memory.age > 1 and not _is_ahead(folder, newest):
        folder = newest  # written by this run since it began, so what it began from is not needed
    found = open_checkpoint(folder, world)
    if newest and (found.step if found else -1) < step_of(newest):
        # Checkpoints are kept and found by their step: those of the other run would count as the newest.
        raise ValueError(
            f"{newest} is ahead of where this run would start (--resume {asked}); use another --models-root, or remove "
            "the checkpoints that are not wanted"
        )
    centres = open_centres(head_centres, world) if head_centres and found is None else None
    for given in filter(None, (found, centres)):
        same_recipe = given.manifest.get("recipe", "face") == run.recipe  # of another one `_compare` says it
        for note in check_class_names(given, source) if source is not None and same_recipe else ():
            run.note(note)
    if found is not None:
        _compare(run, found, backbone, head, may_change)
        check_whole(found)
    elif centres is not None:
        assert isinstance(head, PartialFC)
        load_centres(centres, head)
        run.logger.info(f"class centres from {centres.folder}")
    return found


def _is_ahead(folder: Path | None, newest: Path) -> bool:
    """Whether a folder's name says more steps than `newest`, which is a checkpoint. The same on all ranks."""
    if folder is None or not folder.name.removeprefix("step-").isdecimal():
        return False
    return step_of(folder) > step_of(newest)


def _compare(run: RunContext, found: Stored, backbone: TorchBackbone, head: Head, may_change: tuple[str, ...]) -> None:
    """Tells all that differs from the run that was saved. Raises ValueError where nothing can go on from it so."""
    values = flags.flat(run.config)
    num_classes = head.num_classes if head.rows is not None else None
    differences = compare(found.manifest, run.recipe, backbone.contract, values, may_change, num_classes)
    differences.check(found.folder)
    run.differences = differences.allowed
    for change in differences.allowed:
        run.note(f"{found.folder} was trained with {change}: allowed, but not the same run")


def _load(run: RunContext, found: Stored, backbone: TorchBackbone, head: Head) -> None:
    """What the checkpoint does not have starts anew, whatever the state was before."""
    notes = backbone.load(found)
    check_replicas(backbone.replicated(), run.world)
    for note in (*found.load_head(head), *notes):
        run.note(note)


def _position(manifest: dict[str, Any], source: Source | None) -> int:
    """Samples consumed by all ranks."""
    position = manifest["position"]
    if isinstance(position, int):
        return position
    # Recipe mnist of version 0.1 counted epochs and updates.
    assert source is not None
    configuration = manifest["configuration"]
    update_size = configuration["batch_size"] * configuration["accumulate"] * manifest["world_size"]
    return position["epoch"] * len(source) + min(position["update"] * update_size, len(source))
