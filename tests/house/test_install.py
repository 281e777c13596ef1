"""errors.install: the commands that messages name, as pip takes them beside an installed torch."""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from partial_fc import errors
from tests.house.test_weight import ROOT, tracked

HOST = "https://download.pytorch.org/whl"
NEW = {"torch": "2.14.1", "torchvision": "0.29.1"}


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """Writes an empty package, and its link into the index `folder`."""
    path = folder / name / f"{name}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as file:
        about = f"{name}-{version}.dist-info"
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    with (path.parent / "index.html").open("a") as index:
        index.write(f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>\n')
    return path


@pytest.mark.slow
@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_torch_stays_and_torchvision_is_of_its_build(tmp_path, monkeypatch, build):
    """Simulated: the public index and PyTorch's own, as folders of empty packages, and where the package runs."""
    public, own = tmp_path / "public", tmp_path / "whl" / build.removeprefix("+")
    for folder, torch, vision in ((public, "2.13.0", "0.28.0"), (public, *NEW.values()), (own, "2.13.0", "0.28.0")):
        local = build if folder == own else ""
        there = wheel(folder, "torch", torch + local)
        wheel(folder, "torchvision", vision + local, f"torch=={torch}")
    wheel(public, "timm", "1.0", "torch", "torchvision")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    with zipfile.ZipFile(there) as file:
        file.extractall(sysconfig.get_path("purelib", "posix_prefix", {"base": str(tmp_path / "venv")}))
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages/partial_fc/errors.py"))
    monkeypatch.setattr(errors.metadata, "distributions", lambda **_: [SimpleNamespace(version=f"2.13.0{build}")])
    _, _, *words = shlex.split(errors.install("timm").replace(HOST, f"file://{tmp_path}/whl"))
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install"]
    pip += ["--quiet", "--dry-run", "--report", "-", "--index-url", f"file://{public}", *words]
    environ = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    report = json.loads(subprocess.run(pip, capture_output=True, check=True, env=environ).stdout)
    chosen = {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}
    assert chosen == {"timm": "1.0", "torchvision": f"0.28.0{build}"}


def test_a_checkout_is_named_and_an_older_torch_may_be_replaced(monkeypatch):
    monkeypatch.setattr(errors.metadata, "distributions", lambda **_: [SimpleNamespace(version="2.6.0+cpu")])
    assert shlex.split(errors.install("train"))[3:] == [f"{ROOT}[train]", "--extra-index-url", f"{HOST}/cpu"]
    monkeypatch.setattr(errors, "__file__", "/a place/partial_fc/errors.py")
    assert errors.install("train").startswith("pip install 'torch>=2.13' 'opencv-python-headless>=")


def test_no_page_or_message_takes_our_name_from_an_index():
    paths = tracked("*.md", "*.py", "*.sh", "*.cfg", "Makefile", "Dockerfile", ":!tests")
    told = re.compile(r"pip install partial-fc|['\"`]partial-fc\[")
    assert [str(path) for path in paths if told.search(path.read_text())] == []
