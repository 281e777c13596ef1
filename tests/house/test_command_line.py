"""What a command line is refused for, and how it is told: every number of every recipe and verb, near names, help."""

import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

import partial_fc
from benchmarks.head import bench_head
from partial_fc import cli, flags
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.errors import UsageError
from partial_fc.flags import command_line
from partial_fc.flags.facts import In, check_numbers, flag
from partial_fc.verbs import train as train_command
from recipes.face import insightface
from recipes.face import main as face
from recipes.imagenet import main as imagenet
from recipes.kinetics import main as kinetics
from recipes.mnist import main as mnist
from recipes.mxnet import kvstore_job as mnist_kvstore
from recipes.mxnet.launch.options import LaunchOptions
from tests.unit.models.test_arcface_torch_config import HEAD, write

ROOT = Path(partial_fc.__file__).parent.parent
# Command lines with which nothing is wrong.
RIGHT: dict[str, tuple[Any, str]] = {
    "face": (face.parse, "--dataset synthetic --num-classes 50 --lr-scheduler step"),
    "mnist": (mnist.parse, ""),
    "mnist on mxnet": (mnist_kvstore.parse, "--engine mxnet"),
    "imagenet": (imagenet.parse, "--train-data x --head partial-fc"),
    "kinetics": (kinetics.parse, "--train-list a --val-list b --model slowfast_4x16_resnet50_kinetics400"),
}
HUGE = 10**30


def numeric(options: Any) -> Iterator[tuple[str, type, int]]:
    """(field, int or float, how many it takes; 0: one or more in a tuple) of each field that is a number, or several;
    1: not in a tuple."""
    for name, kind in get_type_hints(options, include_extras=True).items():
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        kinds = [kind, *get_args(kind), *itertools.chain(*map(get_args, get_args(kind)))]
        many = next((k for k in kinds if get_origin(k) is tuple), None)
        for of in (int, float):
            if of in kinds:
                yield name, of, 1 if many is None else len(get_args(many)) * (Ellipsis not in get_args(many))


def wrong_numbers(options: Any, make: Callable[..., Any]) -> Iterator[str]:
    """Each field of a dataclass with numbers that it should refuse by its flag's name, and what it did instead.
    make: field=value -> the dataclass."""
    for name, of, count in numeric(options):
        for number in (math.nan, -math.inf, math.inf, -1, 0, HUGE) if of is float else (-1, 0, HUGE, -HUGE):
            value = of(number) if count == 1 else (of(number),) * (count or 1)
            try:
                make(**{name: value})
            except ValueError as error:
                if flag(name) not in str(error):
                    yield f"{name} {number} is refused with {str(error)!r}"
                continue
            if number in (0, HUGE if of is float else 0) or (name, number) == ("head_clip", math.inf):
                continue  # accepted with a meaning, or what check_numbers(ANY) is for
            if number == -1 and name in SIGNED:
                continue
            yield f"{name} {number} is taken"


# What a verb needs, so that nothing else is wrong with it.
ALSO: dict[str, dict[str, Any]] = {
    "launch": {"num_workers": 2, "launcher": "local"},
    "embed": {"images": (Path("x"),), "out": Path("x.npz")},
    "evaluate": {"model": Path("x"), "ijb": ROOT},
    "export": {"onnx": Path("x.onnx")},
    "data show": {"out": Path("x.png")},
    "data clean": {"sets": (Path("x"),), "out": Path("x")},
}
# Numbers that may be negative.
SIGNED = ("margins", "image_mean_per_channel", "threshold")


@pytest.mark.parametrize("command", RIGHT)
def test_every_number_of_a_recipe_is_refused_by_name_where_it_has_no_meaning(command):
    parse, words = RIGHT[command]
    found = parse(words.split())
    config = found[0] if isinstance(found, tuple) else found
    groups = {name: group for name, group in vars(config).items() if dataclasses.is_dataclass(group)}
    wrong = list(wrong_numbers(type(config), lambda **values: dataclasses.replace(config, **values)))
    for name, group in groups.items():

        def make(name=name, group=group, **values):
            made = dataclasses.replace(group, **values)
            check_numbers(made)  # as command_line.parse does
            dataclasses.replace(config, **{name: made})

        wrong += wrong_numbers(type(group), make)
    assert wrong == []
    num_fields = sum(1 for part in (config, *groups.values()) for _ in numeric(type(part)))
    assert num_fields > 10


@pytest.mark.parametrize("verb", [*(name for name in cli.VERBS if name not in cli._OWN_READERS), "launch"])
def test_every_number_of_a_verb_is_refused_by_name_where_it_has_no_meaning(verb):
    options = LaunchOptions if verb == "launch" else get_type_hints(cli.load(verb))["options"]
    right = dict(ALSO.get(verb, {}))
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            right.setdefault(field.name, 2 if field.type is int else Path("x"))

    def make(**values):
        made = options(**{**right, **values})
        if not hasattr(options, "__post_init__"):
            check_numbers(made)  # as command_line.parse does

    assert list(wrong_numbers(options, make)) == []


@pytest.mark.parametrize(
    ("interval", "value", "says"),
    [
        (0, math.nan, "--a is nan; expected at least 0"),
        (0, math.inf, "--a is inf; expected at least 0 and finite"),
        ("[0, inf]", math.inf, ""),
        ("(0, 1]", 0.0, "--a is 0.0; expected more than 0 and at most 1"),
        ("(0, 1]", 1.0, ""),
        ("[0, 1)", 1.0, "--a is 1.0; expected at least 0 and less than 1"),
        ("(-inf, inf)", -1e30, ""),
        ("(-inf, inf)", math.nan, "--a is nan; expected a number"),
        (0, 2**63, "at most 9223372036854775807"),
        (1, (2, 0), "--a is 0; expected at least 1"),
        (1, None, ""),
        (1, False, ""),
    ],
)
def test_ranges(interval, value, says):
    group = dataclasses.make_dataclass("Group", [("a", Annotated[Any, In(interval)])])(value)
    if not says:
        check_numbers(group)
        return
    with pytest.raises(ValueError, match=re.escape(says)):
        check_numbers(group)


# ---- words that are none


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("face --netwrok r50", "--netwrok is no flag here; did you mean --network?"),
        ("face --backbone rx101 --rec x", "; InsightFace lists it, too, and has no code for it"),
        ("face --sample_ratio 0.1", "--sample_ratio is no flag here: it is --sample-rate"),
        ("face --dataset emor", "did you mean emore?"),
        ("face --network r51", "--network is r51; expected one of r18, r34, r50"),
        ("face --dataset 100w --lr fast", "--lr is fast; expected a number"),
        ("face --dataset 100w --lr auto", "--lr is auto; expected a number"),
        ("face --dataset 100w --num-workers all", "--num-workers is all; expected a whole number or auto"),
        ("face --dataset 100w --num-workers 0", "--num-workers is 0; expected at least 1"),
        ("face --dataset 100w --batch_size 1.5", "--batch_size is 1.5; expected a whole number"),
        ("face --dataset 100w r50", "'r50' belongs to no flag"),
        ("face --dataset 100w --bs 0", "--bs is 0; expected at least 1"),
        ("imagenet --train_data x --bs 4", "--bs is no flag here; did you mean --batch-size?"),
        ("face --network resnet50", "; it is r50 here"),
        ("face --dataset", "--dataset needs a value"),
        ("face --dataset 100w --margins 1 2", "--margins is 1 2; expected a number 3 times"),
        ("face", "--rec DIR is missing"),
        ("imagenet", "--train-data is missing: An LMDB or a LevelDB"),
        ("imagenet --train_data x --bas_learning_rate 1", "did you mean --base_learning_rate?"),
        ("mnist --opt_level O2", "O2 --precision fp16-o2"),
        ("fase", "no recipe 'fase'; did you mean face?"),
        ("qqqqqq", "no recipe 'qqqqqq'. There are face, imagenet"),
    ],
)
def test_a_mistake_is_one_line_that_names_what_was_typed(words, says, capsys):
    assert train_command.main(words.split(), "train.py") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_wrong_flag_of_a_verb(capsys):
    assert cli.run("plan", ["--clases", "5"]) == 2
    assert "partial-fc plan: --clases is no flag here; did you mean --classes?" in capsys.readouterr().err
    assert cli.call(bench_head, ["--np", "0"], "python -m benchmarks.head") == 2
    assert "python -m benchmarks.head: --np is 0; expected at least 1" in capsys.readouterr().err


def test_a_configuration_in_place_of_the_recipe(tmp_path, capsys):
    path = write(tmp_path, f"{HEAD}config.rec = '/data'\n", "ms1mv3_r50.py")
    for word in (str(path), str(path.with_suffix(""))):
        assert train_command.main([word], "train.py") == 2
        assert f"not a recipe: train.py face --config {word}" in capsys.readouterr().err
    config, notes = face.parse(["--config", str(path.with_suffix(""))])
    assert (config.optim.clip, config.head.head_clip, notes) == (5.0, math.inf, [])
    with pytest.raises(UsageError, match=r"no such file; did you mean ms1mv3_r50\?"):
        face.parse(["--config", str(tmp_path / "ms1mv3_r5")])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--bs 7 --wd 0.25 --workers 3", "--batch-size 7 --weight-decay 0.25 --num-workers 3"),
        ("--learning_rate=0.5", "--lr=0.5"),
        ("--num-classes 5 --master_addr none --num-workers auto", "--num-classes 5"),
    ],
)  # fmt: skip
def test_other_names_of_flags_do_the_same(theirs, ours):
    assert face.parse(["--dataset", "100w", *theirs.split()]) == face.parse(["--dataset", "100w", *ours.split()])


def test_what_the_near_names_of_face_lead_to_is_there():
    flags = {flag(name) for name, _ in command_line._fields(face.Config)}
    for theirs, words in insightface.ELSEWHERE.items():
        assert set(re.findall(r"(?<!\w)--[a-z-]+", words)) <= flags, theirs
        assert flag(theirs) not in flags


def test_a_network_of_a_configuration_that_is_not_there_ends_before_anything_is_made(tmp_path):
    words = ["--config", str(write(tmp_path, f"{HEAD}config.network = 'rx50'\n")), "--dataset", "100w"]
    with pytest.raises(UsageError, match=r"network is rx50; .*has no code for it"):
        face.parse(words)
    assert face.parse([*words, "--network", "r18"])[0].model.network == "r18"


# ---- image size


@pytest.mark.parametrize(
    ("says", "typed", "size", "noted"),
    [
        ("12,64,64", "", 64, False),
        ("12,64,64", "--image-size 112", 112, True),
        ("12,64,48", "", 112, True),
        ("12,0,0", "", 112, False),
    ],
)
def test_images_are_taken_at_the_size_that_the_set_says(tmp_path, says, typed, size, noted):
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, pack(0.0, b"an image", 0))
    (tmp_path / "property").write_text(f"{says}\n")
    config, notes = face.parse(["--rec", str(tmp_path), "--network", "tiny", *typed.split()])
    assert (config.data.image_size, notes) == (size, [])
    told = [note for note in face._notes(config, face._source(config.data, 1)) if "resized" in note]
    assert bool(told) == noted


# ---- help


@pytest.mark.parametrize("verb", ["embed", "evaluate", "search"])
def test_help_of_a_verb_leaves_flags_of_several_hosts_to_help_all(verb, capsys):
    told = {}
    for words in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.run(verb, [words])
        told[words] = capsys.readouterr().out
    for name in ("--image-size", "--flip {True,False}", "--gpus", "--device"):
        assert name in told["--help"]
    for name in ("--master-addr", "--comm-timeout", "--nodes INT"):
        assert name not in told["--help"]
        assert name in told["--help-all"]


def printed(words: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        train_command.main(words.split(), "train.py")
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["face", "mnist", "imagenet", "kinetics", "mnist --engine mxnet"])
def test_help_shows_what_matters_and_help_all_the_rest(recipe, capsys):
    module = mnist_kvstore if "mxnet" in recipe else sys.modules[f"recipes.{recipe}.main"]
    names = {field for field, _ in command_line._fields(module.Config)}
    matter = flags.basic(module.Config)
    short, whole = printed(f"{recipe} --help", capsys), printed(f"{recipe} --help-all", capsys)
    for name in names:
        shown = re.search(rf"(?m)^[│ ] (--?[\w-]+ .*, )?{flag(name)}(,| [A-Z{{ ]|\s*$)", short) is not None
        assert shown == (name in matter), name
        assert flag(name) in whole
    assert len(short.splitlines()) < 120
    assert "--help-all shows all" in short
    assert not re.search(r"\{None\}|<class|Error|recipes\.|partial_fc\.", short + whole)
