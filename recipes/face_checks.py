"""Flags of recipe `face` that shape the head and do not go together, or do nothing.

The head refuses most of the same pairs; here they are named as flags, before anything is read or allocated.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from partial_fc.comm import World, elastic
from partial_fc.data import Source
from partial_fc.data.check.at_start import check_data
from partial_fc.head import PartialFC
from partial_fc.optim.rows import RowAdagrad

if TYPE_CHECKING:
    from recipes.face_config import Config


def check_head(config: "Config") -> None:
    """Raises ValueError."""
    _check_ranges(config)
    _check_kernel(config)
    _check_centres(config)
    _check_loss(config)
    _check_accumulation(config)


def look_at_data(config: "Config", source: Source, num_classes: int, world: World) -> list[str]:
    """What --check-data has to say; raises ValueError, on all ranks, for data that is not fit to train on."""
    if config.synthetic:
        return []
    return check_data(
        source,
        num_classes,
        config.check_data,
        world,
        max_bad_records=config.max_bad_records,
        seed=config.seed,
        num_threads=config.num_workers,
    )


def row_optimizer_name(config: "Config") -> str:
    return config.optimizer if config.head_optimizer == "same" else config.head_optimizer


def _check_ranges(config: "Config") -> None:
    if config.sub_centres < 1 or config.hard_negatives < 0 or config.hard_negatives_every < 1:
        raise ValueError(
            f"--sub-centres {config.sub_centres}, --hard-negatives {config.hard_negatives}, --hard-negatives-every "
            f"{config.hard_negatives_every}; expected at least 1, 0 and 1"
        )
    for name in ("interclass_filtering_threshold", "label_smoothing"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{_flag(name)} is {getattr(config, name)}; expected from 0 (none) to below 1")
    for name in ("head_lr", "head_weight_decay"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{_flag(name)} is {value}; expected 0 or more")
    if config.head_lr is not None and not config.lr > 0:
        raise ValueError(
            f"--head-lr {config.head_lr} with --lr {config.lr}: the centres' rate follows the schedule of --lr, as a "
            "multiple of it; give an --lr above 0"
        )


def _check_kernel(config: "Config") -> None:
    if config.precision == "fp64" and config.head_impl in ("cpu", "triton"):
        raise ValueError(f"--head-impl {config.head_impl} computes in fp32; --precision fp64 goes with plain")
    for impl, device in (("cpu", "cuda"), ("triton", "cpu")):
        if config.head_impl == impl and config.device == device:
            raise ValueError(
                f"--head-impl {impl} with --device {device}: it does not run there; leave one of the two out"
            )


def _check_centres(config: "Config") -> None:
    if config.head_centres is not None and config.resume not in ("auto", "never"):
        raise ValueError(
            f"--head-centres with --resume {config.resume}: that checkpoint brings its own centres; leave one "
            "of the two out"
        )
    if (config.centre_place == "disk") != (config.centre_path is not None):
        raise ValueError("--centre-place disk and --centre-path DIR go together: give both, or none")
    if config.centre_path is not None and config.centre_path.exists() and not config.centre_path.is_dir():
        raise ValueError(f"--centre-path {config.centre_path} is a file; expected a folder")
    if config.precision == "fp64" and (config.centre_dtype, config.centre_state_dtype) != ("fp32", "same"):
        raise ValueError("--precision fp64 stores the centres so, too: leave --centre-dtype and its state's out")
    name = row_optimizer_name(config)
    if name == "adagrad" and config.centre_state_dtype != "same":
        raise ValueError(
            f"--centre-state-dtype {config.centre_state_dtype} with --head-optimizer adagrad: its state is one number "
            "a centre, always fp32; leave --centre-state-dtype out"
        )
    state = config.centre_dtype if config.centre_state_dtype == "same" else config.centre_state_dtype
    if name == "adamw" and state == "fp16":
        raise ValueError(
            "AdamW with its state in fp16: squares of gradients are below what fp16 holds, and centres are thrown far "
            "away; add --centre-state-dtype bf16 or fp32, or --head-optimizer adam"
        )
    if name == "nesterov" and not config.momentum:
        raise ValueError("--head-optimizer nesterov with --momentum 0 is plain SGD: give one, or say sgd")


def _check_loss(config: "Config") -> None:
    if config.label_smoothing:
        for flag, used in {
            "--interclass-filtering-threshold": config.interclass_filtering_threshold > 0,
            "--sub-centres": config.sub_centres > 1,
            "--sampling-correction": config.sampling_correction,
            "--loss curricularface": config.loss == "curricularface",
        }.items():
            if used:
                raise ValueError(
                    f"--label-smoothing with {flag}: which classes share the smoothed part, and with which logits, is "
                    "not defined there; leave one of the two out"
                )
    for name in ("sampling_correction", "hard_negatives"):
        if getattr(config, name) and config.sample_rate == 1.0:
            raise ValueError(
                f"{_flag(name)} without sampling: every class takes part in every step; leave it out, or give a "
                "--sample-rate below 1"
            )
    if config.hard_negatives_every != _default(config, "hard_negatives_every") and not config.hard_negatives:
        raise ValueError(
            "--hard-negatives-every without --hard-negatives: there is nothing to search for; give both, or none"
        )


def _check_accumulation(config: "Config") -> None:
    if config.accumulate > 1 and config.loss in ("adaface", "curricularface"):
        raise ValueError(
            f"--accumulate {config.accumulate} with --loss {config.loss}: this loss keeps averages over whole batches, "
            "and micro-batches would give it others; use another loss, or a larger --batch-size"
        )


def notes(config: "Config", head: PartialFC) -> Iterator[str]:
    """What was asked for and makes no difference here."""
    if config.buddy_every and not elastic.active():
        yield (
            f"--buddy-every {config.buddy_every} without effect: there are no commits here; they are for horovodrun "
            "with --min-np and --host-discovery-script"
        )
    if config.centre_place == "host" and head.store.device == torch.device("cpu"):
        yield "--centre-place host: the device that computes is the CPU, whose memory is the host's"
    if config.precision in ("bf16", "fp16", "fp16-o2") and config.head_impl == "plain":
        yield "--head-impl plain multiplies fp32 numbers, whatever --precision says"
    if config.gradient_compression != "none" and head.world.size == 1:
        yield f"--gradient-compression {config.gradient_compression}: one process, nothing travels, it only rounds"
    if config.gradient_compression == "fp16" and config.precision not in ("fp16", "fp16-o2"):
        yield (
            "--gradient-compression fp16 without a loss scale: gradients below 6e-8 vanish on their way, and one above "
            "65,504 ends the run"
        )
    if config.lr_power != _default(config, "lr_power") and config.lr_scheduler != "polynomial":
        yield f"--lr-power goes with --lr-scheduler polynomial; this run's is {config.lr_scheduler}"
    if config.accumulate > 1 and config.hard_negatives:
        yield "--hard-negatives with --accumulate: a class of several micro-batches keeps the list of the last"
    if config.lr_steps and config.lr_scheduler != "step":
        yield f"--lr-steps go with --lr-scheduler step; this run's is {config.lr_scheduler} and has none"
    if config.synthetic and config.check_data != _default(config, "check_data"):
        yield f"--check-data {config.check_data}: synthetic data has nothing to check"
    for name, needed in (("max_skips", "skip"), ("max_rollbacks", "rollback")):
        if getattr(config, name) != _default(config, name) and config.on_nan != needed:
            yield f"{_flag(name)} goes with --on-nan {needed}; this run's is {config.on_nan}"
    if config.on_nan == "rollback" and not config.checkpoint_every and not (config.save_best and config.verbose):
        yield "--on-nan rollback without --checkpoint-every: there will be no checkpoint to go back to before the end"
    if config.desync_every != _default(config, "desync_every") and head.world.size == 1:
        yield "--desync-every: one process has no others to compare itself with"
    if config.num_images is not None and not config.synthetic:
        yield "--num-images is about synthetic data; this run has images"
    if config.head_catch_up == "exact":
        if config.sample_rate == 1.0:
            yield "--head-catch-up exact: without sampling every centre takes part in every step and none is late"
        elif isinstance(head.optimizer, RowAdagrad) and not head.optimizer.weight_decay:
            yield "--head-catch-up exact: Adagrad without weight decay leaves centres alone that do not take part"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(config: "Config", name: str) -> object:
    return next(field.default for field in dataclasses.fields(config) if field.name == name)
