"""The head without the extra [train]: what is imported, and what the commands say."""

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from partial_fc.errors import TRAINER

ROOT = Path(__file__).parents[2]
# Package -> its module, where that has another name. protobuf comes with tensorboard; torch is the head's, too.
MODULES = {"opencv-python-headless": "cv2", "pillow": "PIL", "protobuf": "", "torch": ""}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_the_modules_of_the_trainer_are_those_of_its_extra():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"]["train"].split("\n")
    names = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    assert {MODULES.get(name, name) for name in names} - {""} == set(TRAINER)
    assert setup["options"]["install_requires"].split() == ["torch>=2.6", "numpy"]


def test_the_head_imports_nothing_of_the_trainer_nor_of_torchs_compiler():
    code = f"""
import sys
import torch
before = set(sys.modules)
from partial_fc import PartialFC
feat_BD, head = torch.randn(4, 8, requires_grad=True), PartialFC(10, 8, "cosface")
head(feat_BD, torch.arange(4)).backward()
head.step(0.1)
assert "torch._dynamo" not in sys.modules, "it takes each process two seconds and 200 MB"
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not new & {set(TRAINER)!r}, new
assert not [name for name in new if name == "horovod"]
ours = {{name.partition(".")[2].partition(".")[0] for name in sys.modules if name.startswith("partial_fc.")}}
assert not ours & {{"train", "data", "verbs"}}, ours
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["evaluate", "x"], ["train", "face"], ["launch", "-n", "2", "x"]])
def test_a_command_without_the_trainer_names_the_pip_command_in_one_line(words):
    code = "import sys; sys.modules['cv2'] = None\nfrom partial_fc.cli import main\nsys.argv[1:] = {!r}; main()"
    done = python(code.format(words))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"partial-fc {words[0]}: not installed: cv2")
    assert f"pip install -e '{ROOT}[train]'" in line
