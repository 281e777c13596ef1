import pytest

from partial_fc import flags
from recipes import face_presets as presets
from recipes.face import parse


def test_published_numbers():
    # As published, typed a second time here on purpose.
    expected = {
        "webface": (10575, None, (20000, 28000), 32000, 512),
        "emore": (85742, 5822653, (100000, 160000), 180000, 512),
        "glint360k_8GPU": (360232, 17091657, (200000, 400000, 500000, 550000), 600000, 512),
        "glint360k_16GPU": (360232, 17091657, (200000, 280000, 360000), 400000, 1024),
        "100w": (10**6, None, (20000, 28000), 32000, 512),
        "1000w": (10**7, None, (20000, 28000), 32000, 512),
        "2000w": (2 * 10**7, None, (20000, 28000), 32000, 512),
        "3000w": (3 * 10**7, None, (20000, 28000), 32000, 512),
        "10000w": (10**8, None, (20000, 28000), 32000, 512),
        "ms1mv3": (93431, 5179510, (), None, 1024),
        "wf4m": (205990, 4235242, (), None, 1024),
        "wf12m": (617970, 12720066, (), None, 1024),
        "wf42m": (2059906, 42474557, (), None, 1024),
    }
    got = {
        name: (p["num_classes"], p.get("num_images"), p.get("lr_steps", ()), p.get("max_steps"), p["base_batch_size"])
        for name, p in presets.PRESETS.items()
        if name not in ("glyphs", "synthetic")
    }
    assert got == expected


def test_glyphs_are_not_mirrored():
    glyphs = presets.get("glyphs")
    assert not glyphs["mirror"]
    assert glyphs["val_targets"] == ("unseen", "unseen_font", "lookalike")
    assert not any("mirror" in preset for name, preset in presets.PRESETS.items() if name != "glyphs")


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"--dataset is glint; .*glint360k_8GPU.*did you mean glint360k_"):
        presets.get("glint")


def test_every_value_of_a_preset_is_a_flag_of_the_recipe():
    known = flags.flat(parse(["--dataset", "synthetic", "--num-classes", "2"])[0]).keys()
    for name, preset in presets.PRESETS.items():
        assert preset.keys() <= known, name


def test_a_flag_beats_the_file_which_beats_the_preset(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(
        "from easydict import EasyDict as edict\nconfig = edict()\nconfig.batch_size = 48\nconfig.lr = 0.7\n"
    )
    config, _ = parse(["--dataset", "emore", "--rec", str(tmp_path), "--config", str(file), "--lr", "0.9"])
    assert (config.data.num_classes, config.optim.batch_size, config.schedule.lr) == (85_742, 48, 0.9)
    assert config.schedule.lr_scheduler == "polynomial", "what arcface_torch always does"


def test_what_the_data_says_of_itself_beats_the_preset(tmp_path):
    """A class count from a flag beats both."""
    (tmp_path / "train.rec").touch()
    (tmp_path / "property").write_text("50,64,64\n")
    arguments = ["--dataset", "emore", "--rec", str(tmp_path)]
    config, notes = parse(arguments)
    assert (config.data.num_classes, config.data.image_size) == (50, 64)
    (note,) = notes
    assert note.startswith("--dataset emore means --num-classes 85742; ")
    assert f"{tmp_path} says 50, which is taken" in note
    assert parse([*arguments, "--num_classes", "85742"])[0].data.num_classes == 85_742
    config, (note,) = parse(["--dataset", "glyphs", "--rec", str(tmp_path)])
    assert (config.data.num_classes, config.data.image_size) == (None, 64)
    assert "--image-size 40" in note
