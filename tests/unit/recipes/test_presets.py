import pytest
import torch

from partial_fc import flags
from recipes.face import presets
from recipes.face.backbone import rates_of
from recipes.face.main import parse
from tests.unit.models.test_arcface_torch_config import HEAD, write


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"--dataset is glint; .*glint360k_8GPU.*did you mean glint360k_"):
        presets.get("glint")


def test_every_value_of_a_preset_is_a_flag_of_the_recipe():
    known = flags.flat(parse(["--dataset", "synthetic", "--num-classes", "2"])[0]).keys()
    for name, preset in presets.PRESETS.items():
        assert preset.keys() <= known, name


def test_a_flag_beats_the_file_which_beats_the_preset(tmp_path):
    file = write(tmp_path, f"{HEAD}config.batch_size = 48\nconfig.lr = 0.7\n")
    config, _ = parse(["--dataset", "emore", "--rec", str(tmp_path), "--config", str(file), "--lr", "0.9"])
    assert (config.data.num_classes, config.optim.batch_size, config.schedule.lr) == (85_742, 48, 0.9)
    assert config.schedule.lr_scheduler == "arcface-torch", "what arcface_torch always does"
    assert config.head.head_catch_up == "exact", "its optimizer moves all centres; those of MXNet's presets rest"
    assert parse(["--dataset", "emore", "--rec", str(tmp_path)])[0].head.head_catch_up == "none"
    assert parse(["--dataset", "ms1mv3", "--rec", str(tmp_path)])[0].head.head_catch_up == "exact"


def test_what_the_data_says_of_itself_beats_the_preset(tmp_path):
    """A class count from a flag beats both."""
    (tmp_path / "train.rec").touch()
    (tmp_path / "property").write_text("50,64,64\n")
    arguments = ["--dataset", "emore", "--rec", str(tmp_path), "--network", "r50"]
    config, notes = parse(arguments)
    assert (config.data.num_classes, config.data.image_size) == (50, 64)
    (note,) = notes
    assert note == f"--num-classes 50, as {tmp_path} says, not --dataset emore's 85742"
    assert parse([*arguments, "--num_classes", "85742"])[0].data.num_classes == 85_742
    config, (note,) = parse(["--dataset", "glyphs", "--rec", str(tmp_path)])
    assert (config.data.num_classes, config.data.image_size) == (None, 64)
    assert note.startswith("--image-size 64, ")


# ---- a network that nobody names


@pytest.mark.parametrize(
    ("words", "has_gpu", "network"),
    [
        ("", False, "tiny"),
        ("", True, "r50"),
        ("--device cpu", True, "tiny"),
        ("--device cuda", False, "r50"),
        ("--dataset glyphs", False, "mini"),
        ("--pretrained model.pt", False, "r50"),
        ("--models-root RUN", False, "mbf"),
        ("--models-root RUN --resume never", False, "tiny"),
        ("--resume RUN/checkpoints/step-00000003", True, "mbf"),
    ],
)
def test_a_network_that_nobody_names_is_the_checkpoints_or_the_devices(tmp_path, monkeypatch, words, has_gpu, network):
    monkeypatch.setattr("recipes.face.main.may_have_gpu", lambda: has_gpu)
    folder = tmp_path / "run/checkpoints/step-00000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"contract": {"network": "mbf"}}')
    words = words.replace("RUN", str(tmp_path / "run")).split()
    config, notes = parse(["--rec", str(tmp_path), *words])
    assert config.model.network == network
    assert any("--network r50" in note for note in notes) == (network == "tiny")


# ---- transformers


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--network vit_b", ("adamw", 5e-4, "none", 0.05)),
        ("--backbone=timm:deit_tiny_patch16_224", ("adamw", 5e-4, "none", 0.05)),
        ("--network vit_b --dataset ms1mv3", ("adamw", 5e-4, "none", 0.05)),
        ("--network vit_t --dataset glyphs", ("adamw", 5e-4, "none", 0.05)),
        ("--network vit_t --optimizer adamw --lr_scaling=linear", ("adamw", 5e-4, "linear", 0.05)),
        ("--network vit_t --lr 1e-4 --weight-decay 0.1", ("adamw", 1e-4, "none", 0.1)),
        ("--network vit_t --optimizer sgd", ("sgd", 0.1, "linear", 5e-4)),
        ("--network vit_t --config CONFIG", ("sgd", 0.02, "none", 5e-4)),
        ("--network r50", ("sgd", 0.1, "linear", 5e-4)),
        ("--network timm:convnext_tiny", ("sgd", 0.1, "linear", 5e-4)),
        ("--dataset glyphs", ("muon", 0.007, "linear", 0.05)),
    ],
)
def test_a_transformer_starts_with_adamw_where_nothing_else_is_named(tmp_path, line, expected):
    file = write(tmp_path, f"{HEAD}config.lr = 0.02\nconfig.optimizer = 'sgd'\n")
    words = line.replace("CONFIG", str(file)).split()
    config, notes = parse(["--rec", str(tmp_path), "--models-root", str(tmp_path / "run"), *words])
    optim, schedule = config.optim, config.schedule
    assert (optim.optimizer, schedule.lr, schedule.lr_scaling, optim.weight_decay) == expected
    said = [note for note in notes if "transformer" in note]
    assert len(said) == (expected[0] == "adamw")
    assert not said or ("--optimizer adamw" in said[0]) == ("--optimizer" not in line)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet18"])
def test_families_of_timm_with_attention(name):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        assert hasattr(timm.create_model(name), "no_weight_decay") == bool(rates_of(f"timm:{name}", (), None))
