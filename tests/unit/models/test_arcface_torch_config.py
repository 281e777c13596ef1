import math
from pathlib import Path

import pytest

from partial_fc import models
from partial_fc.optim import backbone as torch_optim
from recipes.face import main as face
from recipes.face.arcface_torch import load, read
from recipes.face.backbone import ModelFlags
from recipes.face.settings import translate

SERVER = '''
"""One server, ArcFace."""
from easydict import EasyDict as edict

# the records lie in memory
config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "r50"
config.resume = False
config.output = None
config.embedding_size = 512
config.sample_rate = 1
config.fp16 = False
config.momentum = 0.9
config.weight_decay = 5e-4
config.batch_size = 128
config.lr = 0.1
config.verbose = 2000
config.dali = False
config.rec = "/train_tmp/faces"
config.num_classes = 93431
config.num_image = 5179510
config.num_epoch = 20
config.warmup_epoch = 0
config.val_targets = ['lfw', "cfp_fp"]
'''

CLUSTER = """
from easydict import EasyDict
cfg = EasyDict({"network": "r100", "wandb_key": "SECRET"})
cfg.margin_list = [1.0, 0.0, 0.4]
cfg.sample_rate = .3
cfg.fp16 = True
cfg.batch_size = 128
cfg.lr = 0.1 * 32 / 8
cfg.optimizer = "sgd"
cfg.rec = "synthetic"
cfg.num_classes = 200 * 10000 + 59906
cfg.num_epoch = 20
cfg.warmup_epoch = cfg.num_epoch // 10
cfg.output = "work_dirs/web"
cfg.resume = True
cfg.val_targets = []
cfg.dali = True
cfg.num_workers = 8
"""


def write(tmp_path, text, name="config.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_server_config(tmp_path):
    flags, notes = load(write(tmp_path, SERVER))
    assert flags == {
        "lr_scheduler": "arcface-torch",
        "lr_scaling": "none",
        "clip": 5.0,
        "head_clip": math.inf,
        "accumulate_sum": True,
        "decay_all": True,
        "head_catch_up": "exact",
        "loss": "arcface-straight-through",
        "scale": 64.0,
        "network": "r50",
        "resume": "same",
        "embedding_size": 512,
        "sample_rate": 1.0,
        "precision": "fp32",
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "batch_size": 128,
        "lr": 0.1,
        "verbose": 2000,
        "rec": Path("/train_tmp/faces"),
        "num_classes": 93431,
        "num_images": 5179510,
        "epochs": 20,
        "warmup_epochs": 0,
        "val_targets": ("lfw", "cfp_fp"),
    }
    (note,) = notes
    assert note.startswith("config.margin_list: the margin's slope is left out")
    assert isinstance(flags["sample_rate"], float)


def test_cluster_config(tmp_path):
    flags, notes = load(write(tmp_path, CLUSTER))
    assert (flags["loss"], flags["network"], flags["dataset"]) == ("cosface", "r100", "synthetic")
    assert "rec" not in flags
    assert flags["lr"] == 0.1 * 32 / 8
    assert flags["num_classes"] == 2059906
    assert flags["warmup_epochs"] == 2
    assert flags["models_root"] == Path("work_dirs/web")
    assert flags["resume"] == "auto"
    assert flags["precision"] == "auto"
    assert flags["val_targets"] == ()
    text = "\n".join(notes)
    assert "config.dali has no effect" in text
    assert flags["num_workers"] == 8
    assert (flags["sample_rate"], flags["quota"]) == (0.3, "insightface")
    assert "config.sample_rate = 0.3: --quota insightface" in text
    assert all(len(note) <= 94 and "docs/coming-from-insightface.md" in note for note in notes if "output" not in note)
    assert "bf16" in text
    assert "SECRET" not in str(flags) + text
    assert translate({"warmup_epoch": -1})[0]["warmup_epochs"] == 0


def test_base_beside_the_file_is_read_first(tmp_path):
    write(tmp_path, "from easydict import EasyDict as edict\nc = edict()\nc.seed = 7\nc.lr = 1.0\n", "base.py")
    flags, _ = load(write(tmp_path, SERVER, "ms1mv3_r50.py"))
    assert (flags["seed"], flags["lr"]) == (7, 0.1)
    assert load(tmp_path / "base.py")[0]["lr"] == 1.0


def test_values(tmp_path):
    text = """
from easydict import EasyDict as edict
config = edict()
config.negative = -1
config.plus = +2.5
config.power = 10 ** -3 % 7
config.mixed = [1, (2, None), True]
config.copy = config.plus - 1
config.first = config.second = "x" "y"
config.negative = -2
"""
    assert read(write(tmp_path, text)) == {
        "negative": -2,
        "plus": 2.5,
        "power": 1e-3,
        "mixed": [1, (2, None), True],
        "copy": 1.5,
        "first": "xy",
        "second": "xy",
    }


HEAD = "from easydict import EasyDict as edict\nconfig = edict()\n"


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from .easydict import EasyDict as edict",
        "__import__('os').system('touch x')",
        "config.output = open('x', 'w')",
        "config.output = 'a' + 'b'",
        "config.output = 1 / 0",
        "config.output = 9 ** 9 ** 9",
        "config.output = config.missing",
        "config.lr *= 2",
        "lr = 0.1",
        "del config",
        "if True:\n    config.lr = 0.1",
    ],
)
def test_anything_but_data_is_refused(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, HEAD + line)
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: `")
    assert "allowed are" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.py"]


def test_what_would_change_the_result_is_refused():
    with pytest.raises(ValueError, match=r"config\.dali_aug = "):
        translate({"dali_aug": True})
    assert translate({"dali_aug": False}) == translate({})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sample_rat", 0.1, "did you mean sample_rate"),
        ("zzz", 0.1, "known are .*batch_size"),
        ("batch_size", "128", "expected"),
        ("fp16", "no", "expected"),
        ("val_targets", ["lfw", 1], "expected"),
        ("margin_list", (1.0, 0.5), "expected"),
    ],
)
def test_unknown_keys_and_wrong_types(key, value, words):
    with pytest.raises(ValueError, match=rf"config\.{key} .*{words}"):
        translate({key: value})


def test_the_filter_keeps_its_threshold_and_says_what_is_different():
    flags, notes = translate({"interclass_filtering_threshold": 0.4})
    assert flags["interclass_filtering_threshold"] == 0.4
    assert "left out" in notes[0]
    flags, notes = translate({"interclass_filtering_threshold": 0})
    assert flags["interclass_filtering_threshold"] == 0.0
    assert notes == []


def test_other_margins_keep_their_values():
    flags, notes = translate({"margin_list": (1, 0, 0.35)})
    assert (flags["loss"], flags["margins"], notes) == ("combined", (1.0, 0.0, 0.35), [])
    flags, (note,) = translate({"margin_list": (1.0, 0.3, 0.2)})
    assert (flags["loss"], flags["margins"]) == ("combined", (1.0, 0.0, 0.2)), "theirs reads the last one only"
    assert "m1 and m2 are ignored" in note
    flags, _ = translate({"margin_list": (1.0, 0.3, 0.0)})
    assert (flags["loss"], flags["margins"]) == ("arcface-straight-through", (1.0, 0.3, 0.0))


def test_every_tensor_of_a_transformer_decays_as_there():
    """By default its norms, biases and position embeddings have no decay."""
    found, _ = translate({"network": "vit_t", "optimizer": "adamw", "weight_decay": 0.1})
    module = models.build("vit_t", 8, 112)
    shared = {"decay_biases": False, "decay_norms": False, "no_decay": module.no_weight_decay()}  # of Run.backbone
    decays = []
    for decay_all in (found["decay_all"], False):
        own = ModelFlags(network="vit_t", decay_all=decay_all).optimizer_options()
        groups = torch_optim.build("adamw", module, 0.9, 0.1, **{**shared, **own}).param_groups
        decays.append([p.dim() for group in groups if group["weight_decay"] == 0.1 for p in group["params"]])
        assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    assert len(decays[0]) == len(list(module.parameters())) > len(decays[1]) > 0
    assert min(decays[0]) == 1 < min(decays[1])


def test_a_stale_num_image_is_said(tmp_path):
    file = write(tmp_path, HEAD + "config.num_image = 1000\n")
    for count, said in ((135, 1), (1000, 0)):
        config, _ = face.parse(["--config", str(file), "--rec", str(tmp_path)])
        notes = [note for note in face._notes(config, [None] * count) if "num_image" in note]
        assert len(notes) == said
        assert all("1,000" in note and "135" in note for note in notes)


def test_the_function_of_partial_fc_on_mxnet_is_told_from_data(tmp_path):
    text = f"{HEAD}def generate_config(loss, dataset, network):\n    config.loss_s = 1\n"
    with pytest.raises(ValueError, match=r"config.py:\d+: generate_config: a function is not run.*--dataset emore"):
        load(write(tmp_path, text))
