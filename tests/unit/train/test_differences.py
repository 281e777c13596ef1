"""What a run is told that goes on with other flags than it began with: every flag of every recipe, changed in turn."""

import json
import math
import shlex
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from partial_fc import flags
from partial_fc.train.resume import compare
from recipes.face import main as face
from recipes.imagenet import main as imagenet
from recipes.imagenet.rendezvous.start import RendezvousFlags
from recipes.kinetics import main as kinetics
from recipes.mnist import main as mnist

WORDS = {
    face: "--rec DIR",
    imagenet: "--train_data DIR",
    kinetics: "--model slowfast_4x16_resnet50_kinetics400 --train-list LIST --train-only",
    mnist: "",
}
# What the network of each is made by.
CONTRACT = {
    face: {"network": "network", "embedding_size": "embedding_size", "image_size": "image_size"},
    imagenet: {"network": "network", "groups": "resnext_num_groups", "width_per_group": "resnext_width_per_group",
               "conventions": "conventions", "image_size": "image_size"},
    kinetics: {"network": "model", "width": "width"},
    mnist: {},
}  # fmt: skip
# Besides those of the groups that say how and where a run is trained.
HEAD = "head_impl start_centres centre_place"
MAY_CHANGE = {
    face: f"{HEAD} config num_workers max_bad_records check_data val_targets pretrained pretrained_partial "
    "activation_checkpointing trust_code compile",
    imagenet: f"{HEAD} num_workers max_bad_records check_data test_data load_model_path pretrained",
    kinetics: "num_workers prefetch_ratio max_bad_records check_data data_dir val_data_dir val_list logging_file "
    "save_frequency resume_params resume_epoch train_only eval num_segments three_crop "
    "channels_last_3d",
    mnist: "n_workers load_amp save_amp data_dir",
}
# Besides the contract's.
REFUSED = {
    face: {"num_classes", "sub_centres", "optimizer", "head_optimizer", "lora"},
    imagenet: {"num_labels", "head", "sub_centres", "optimizer", "head_optimizer"},
    kinetics: {"num_classes", "optimizer"},
    mnist: {"optimizer"},
}
RECIPES = pytest.mark.parametrize("recipe", WORDS, ids=lambda recipe: recipe.__name__)


def parsed(recipe: Any) -> Any:
    config = recipe.parse(shlex.split(WORDS[recipe]))
    return config[0] if isinstance(config, tuple) else config


def types(config: Any) -> dict[str, Any]:
    """Flag -> its type, of all groups."""
    found = {}
    for name, group in vars(config).items():
        hints = get_type_hints(type(group))
        found |= {field: hints[field] for field in vars(group)} if hints else {name: type(group)}
    return found


def another(kind: Any, value: Any) -> Any:
    """Another value of a flag."""
    if get_origin(kind) is not None and str in map(type, get_args(kind)):
        return [choice for choice in get_args(kind) if choice != value][-1]
    if value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, 1)
    return f"{value}x"


def told(recipe: Any, then: dict[str, Any], now: dict[str, Any]) -> Any:
    def contract(values: dict[str, Any]) -> dict[str, str]:
        return {name: str(values[flag]) for name, flag in CONTRACT[recipe].items()}

    name = recipe.__name__.rpartition(".")[2]
    manifest = {"recipe": name, "contract": contract(then), "configuration": json.loads(json.dumps(then, default=str))}
    return compare(manifest, name, contract(now), now, flags.facts(recipe.Config))


@RECIPES
def test_every_flag_is_refused_with_both_values_or_named_or_free(recipe):
    config = parsed(recipe)
    values, kinds = flags.flat(config), types(config)
    assert values.keys() == kinds.keys()
    if "num_classes" in values:
        values["num_classes"] = values["num_classes"] or 5
    groups = (flags.LaunchFlags, flags.RunFlags, flags.GuardFlags, RendezvousFlags)
    free = {name for group in groups for name in group.__dataclass_fields__} - {"seed", "num_shards"}
    free |= {"epochs", "max_steps", *MAY_CHANGE[recipe].split()}
    refused = REFUSED[recipe] | set(CONTRACT[recipe].values())
    assert not told(recipe, values, values).refused + told(recipe, values, values).allowed
    for name, value in values.items():
        now = another(kinds[name], value)
        found = told(recipe, values, values | {name: now})
        change = f"{flags.switch(name, value)}, this run has {flags.switch(name, not value)}"
        if type(value) is not bool or type(now) is not bool:
            change = f"{flags.flag(name)} {list(value) if isinstance(value, tuple) else value}, this run has "
            change += str(list(now) if isinstance(now, tuple) else now)
        if name in refused:
            assert [text.startswith(change) for text in found.refused] == [True], name
            assert not found.allowed
            with pytest.raises(ValueError, match=r"step-7 was trained with .* --models-root NEW") as error:
                found.check("step-7")
            assert change in str(error.value)
        else:
            assert not found.refused, name
            assert found.allowed == ([] if name in free else [change]), name


def test_flags_that_have_left_are_no_difference():
    values = flags.flat(parsed(face))
    assert not any(told(face, values | {"engine": "mxnet", "log_style": "insightface-mxnet"}, values).__dict__.values())


def test_what_json_has_no_number_for_is_no_difference():
    """As --head-clip of an arcface_torch config."""
    values = flags.flat(parsed(face)) | {"head_clip": math.inf}
    assert not told(face, values | {"head_clip": None}, values).allowed


def test_centres_that_rested_go_on_resting():
    """Nobody knows the learning rates of the steps that they missed."""
    values = flags.flat(parsed(face))
    found = told(face, values | {"head_catch_up": "none"}, values | {"head_catch_up": "exact"})
    assert found.__dict__ == {"refused": [], "allowed": [], "kept": {"head_catch_up": "none"}}
    changed = flags.replaced(parsed(face), found.kept)
    assert flags.flat(changed) == values | {"head_catch_up": "none"}


def test_what_moves_the_centres_counts_not_what_it_is_called():
    values = flags.flat(parsed(face))
    assert not told(face, values, values | {"head_optimizer": "sgd"}).refused
    assert not told(face, values, values | {"head_optimizer": "nesterov"}).refused
    both = told(face, values | {"head_optimizer": "sgd"}, values | {"head_optimizer": "same", "optimizer": "adamw"})
    assert len(both.refused) == 2


def test_other_classes_are_refused_whoever_counts_them():
    """None of the flags says how many there are: the data does."""
    values = flags.flat(parsed(face))
    manifest = {"recipe": "face", "configuration": values, "tables": {"": {"num_classes": 60}}}
    assert not compare(manifest, "face", {}, values, {}, num_classes=60).refused
    (refused,) = compare(manifest, "face", {}, values, {}, num_classes=61).refused
    assert "--num-classes 60, this run has 61" in refused
