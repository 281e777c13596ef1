"""`partial_fc.load`: a trained backbone from any file that holds one.

a run's folder (--models-root)            its model.safetensors, else its newest checkpoint
model.safetensors                         states network, sizes, input contract, flip rule and step
a checkpoint (step-N), or a folder of them    likewise, in its manifest
model.pt, backbone.pth, checkpoint_gpu_R.pt   arcface_torch's: names and shapes tell the network
.pt, .pth, .ckpt, .bin                    the same from elsewhere; prefixes of DistributedDataParallel, torch.compile
                                          and Lightning ("module.", "_orig_mod.") are dropped; AdaFace's and
                                          face.evoLVe's IR networks; a whole module, of which the tensors are read
.onnx                                     an iresnet or MobileFaceNet, as InsightFace publishes them
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc import models
from partial_fc.checkpoint.folders import MANIFEST, is_step, newest, step_folder, step_of
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.embedding.model import EmbeddingModel, VectorModel
from partial_fc.file_kind import it_is, kind_of_file
from partial_fc.foreign.networks import Network, network_of
from partial_fc.foreign.others import OTHERS
from partial_fc.foreign.state_dicts import check_fits, fitting, misfits, read_weights
from partial_fc.models import encoders
from partial_fc.models.inputs import FACE, Pixels, Unchanged, contract_of
from partial_fc.models.vectors import input_of, is_of_vectors

_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".onnx")
_KINDS = ("a safetensors file", "a file of torch.save", "a pickle", "an ONNX model")  # under any name
_EXPECTED = (
    "expected a run's folder, a checkpoint's, model.safetensors, arcface_torch's model.pt, backbone.pth or "
    "checkpoint_gpu_0.pt, or InsightFace's .onnx"
)
_log = logging.getLogger("partial_fc")


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    image_size: int | None = None,
    flip: bool | None = None,
    trust_code: bool = False,
) -> EmbeddingModel:
    """Loads the trained backbone at a path, ready to embed images.

    image_size: pixels of a side, for files that do not state it; None: the largest that the weights fit. flip: add the
    flipped image's embedding; None: as the file states, else yes. trust_code: execute the FILE.py in the run's folder
    that builds its network, if that was --network FILE.py:FUNCTION. Raises ValueError for a file that is damaged, of
    another kind of network or of another image_size.
    """
    return find(Path(path), image_size, flip, trust_code).model().to(device)


@dataclass(frozen=True)
class Found:
    """A backbone found in a file. source: that file, or the checkpoint's folder."""

    weights: dict[str, Tensor]
    network: Network
    to_input: Pixels | Unchanged
    flip: bool
    source: Path
    step: int | None

    def model(self) -> EmbeddingModel:
        network, module = self.network, self.network.build("meta")  # on meta: skips the initialisation
        module.load_state_dict({name: _fp32(t) for name, t in self.weights.items()}, assign=True)
        kind = VectorModel if isinstance(self.to_input, Unchanged) else EmbeddingModel
        return kind(
            module,
            network.name,
            network.embedding_size,
            network.image_size,
            to_input=self.to_input,  # type: ignore[arg-type]
            flip=self.flip,
            source=self.source,
            step=self.step,
        )

    def start(self, module: nn.Module, wanted: Network) -> None:
        """Loads the weights into a module, to continue training. Raises ValueError if it is not of network `wanted`."""
        shapes = {name: t.shape for name, t in self.weights.items()}
        # arcface_torch's vit_b and vit_b_dp005_mask_005 differ in training only.
        names = {network.name.partition("_dp005")[0] for network in (self.network, wanted)}
        if len(names) > 1 or shapes != {name: t.shape for name, t in module.state_dict().items()}:
            raise ValueError(f"{self.source} is a backbone {self.network}; this run has {wanted}")
        module.load_state_dict(self.weights)


@dataclass(frozen=True)
class Stored:
    """Stored weights, not validated yet. facts: what the file states about them."""

    source: Path
    weights: dict[str, Tensor]
    facts: dict[str, str]

    def check_input(self, ours: Pixels | Unchanged) -> None:
        """Raises ValueError if the weights expect other pixels, or vectors, than our network."""
        if isinstance(ours, Unchanged) or is_of_vectors(self.facts.get("network", "")):
            if self.facts.get("input") != ours.description:
                raise ValueError(
                    f"{self.source} takes {self.facts.get('input')}; this run's network takes {ours.description}"
                )
            return
        theirs = contract_of(self.facts) or ours
        if (theirs.mean, theirs.std, theirs.bgr) != (ours.mean, ours.std, ours.bgr):
            raise ValueError(f"{self.source} takes {theirs.description}; this run's network takes {ours.description}")

    def start_partly(self, module: nn.Module) -> str:
        """Loads the weights that match a module's; returns a sentence on the others. Raises ValueError if none do."""
        expected = module.state_dict()
        taken = fitting(self.weights, expected)
        problems = misfits(self.weights, expected)
        if not taken:
            raise ValueError(f"{self.source}: none of its tensors fits this network: {problems}")
        module.load_state_dict(taken, strict=False)
        return f"{len(taken)} of the network's {len(expected)} tensors from {self.source}; {problems or 'all fit'}"


def find(path: Path, image_size: int | None = None, flip: bool | None = None, trust_code: bool = False) -> Found:
    """Finds the backbone at a path and validates its weights; see `load`."""
    if image_size is not None and (type(image_size) is not int or image_size < models.SMALLEST_IMAGE):
        raise ValueError(f"image_size is {image_size!r}; expected a whole number from {models.SMALLEST_IMAGE}")
    if flip not in (None, True, False):
        raise ValueError(f"flip is {flip!r}; expected True, False or None")
    stored = stored_at(path)
    if "note" in stored.facts:
        _log.warning(f"{stored.source}: {stored.facts['note']}")
    return check(stored, image_size, flip, trust_code)


def stored_at(path: Path) -> Stored:
    """Reads the weights at a path, from any supported file."""
    if path.name == "backbone.safetensors" and (path.parent / MANIFEST).exists():
        path = path.parent  # the manifest beside it describes it
    if path.is_dir():
        delivered = path / "model.safetensors"
        if is_step(path) or not delivered.exists():
            return _of_checkpoint(Checkpoint(_step(path)))
        found = stored_at(delivered)
        latest, step = newest(path / "checkpoints"), found.facts.get("step", "")
        if latest is not None and step.isdecimal() and step_of(latest) > int(step):
            _log.warning(f"{delivered} is of step {step}; {latest} is newer: give its path to use it")
        return found
    if not path.exists():
        raise ValueError(f"{path} not found; {_EXPECTED}")
    if path.suffix not in _SUFFIXES and kind_of_file(path) not in _KINDS:
        raise ValueError(f"{path} is {_other(path) or f'of no known kind{it_is(path)}; {_EXPECTED}'}")
    return Stored(path, *read_weights(path))


def _other(path: Path) -> str:
    """Returns what a file or folder of another program is, and what can be done; empty if it is not known."""
    names = [child.name for child in path.iterdir()] if path.is_dir() else [path.name, kind_of_file(path)]
    return next((what for pattern, what in OTHERS.items() if any(re.search(pattern, name) for name in names)), "")


def from_checkpoint(stored: Checkpoint, flip: bool | None = None, trust_code: bool = False) -> Found:
    """Returns the backbone of a checkpoint. Raises ValueError if it has none that embeds images."""
    return check(_of_checkpoint(stored), flip=flip, trust_code=trust_code)


def _of_checkpoint(stored: Checkpoint) -> Stored:
    manifest = stored.manifest
    facts = facts_of(manifest)
    missing = [name for name in ("network", "embedding_size", "image_size") if name not in facts]
    if missing and facts.get("network", "mbf") in models.NAMES:
        raise ValueError(
            f"{stored.where} does not say which network it has: its manifest lacks {', '.join(missing)}. It "
            "cannot embed images (`checkpoint classes add` also takes embeddings: NAME=FILE.npy)"
        )
    return Stored(stored.folder, stored.backbone(), facts)


def facts_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns a manifest's facts about the network, as in model.safetensors."""
    return {"recipe": manifest.get("recipe", ""), **manifest.get("contract", {}), "step": str(manifest["step"])}


def _step(folder: Path) -> Path:
    try:
        return step_folder(folder)
    except ValueError as error:
        other = _other(folder) if folder.is_dir() else ""
        found = f"is {other}" if other else f"holds no model.safetensors, and no complete checkpoint; {_EXPECTED}"
        raise ValueError(f"{folder} {found}") from error


def check(stored: Stored, image_size: int | None = None, flip: bool | None = None, trust_code: bool = False) -> Found:
    """Validates stored weights. Raises ValueError if they are of no known network, or incomplete."""
    path, weights, facts = stored.source, stored.weights, stored.facts
    if "network" in facts:
        network = _said(path, facts, trust_code)
        if image_size is not None and image_size != network.image_size:
            raise ValueError(f"{path} was trained on images of {network.image_size} pixels; image_size is {image_size}")
    else:
        network = network_of(weights, path, image_size)
    check_fits(weights, network.build("meta").state_dict(), path, str(network))
    try:
        of_vectors = is_of_vectors(network.name)
        to_input = input_of(network.image_size) if of_vectors else contract_of(facts) or FACE
        for numbers in () if isinstance(to_input, Unchanged) else (to_input.mean, to_input.std):
            if isinstance(numbers, tuple) and len(numbers) != 3:
                raise ValueError(f"it takes {to_input.description}; expected 3 channels")
        step = int(facts["step"]) if "step" in facts else None
        said = {"true": True, "false": False}[facts.get("flip", "true")]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: its metadata is invalid: {error}") from error
    return Found(dict(weights), network, to_input, said if flip is None else flip, path, step)


def _said(path: Path, facts: Mapping[str, str], trust_code: bool) -> Network:
    """Returns the network that a file names. Raises ValueError if recipe face has no such network."""
    name, recipe = facts["network"], facts.get("recipe", "another")
    of_vectors = is_of_vectors(name)
    if name not in models.NAMES and not encoders.is_encoder(name) and not of_vectors:
        raise ValueError(
            f"{path} is {name} of recipe {recipe}, which gives no embedding of an image; expected a network of recipe "
            f"face: {', '.join(models.NAMES)}"
        )
    sizes = [facts.get(size, "") for size in ("embedding_size", "input_size" if of_vectors else "image_size")]
    if not all(size.isdecimal() and len(size) < 6 for size in sizes):
        raise ValueError(f"{path}: its embedding size is {sizes[0]!r}, image size {sizes[1]!r}; expected whole numbers")
    return Network(name, int(sizes[0]), int(sizes[1]), _folder_of_code(path, name, trust_code))


def _folder_of_code(path: Path, name: str, trust_code: bool) -> Path | None:
    """Returns the folder of a network's FILE.py: the run's, for its model.safetensors and its checkpoints. Raises
    ValueError if there is none, or its code is not trusted."""
    if not name.partition(":")[0].endswith(".py"):
        return None
    file = encoders.split(name)[0]
    places = [path, *path.resolve().parents[:2]] if path.is_dir() else [path.parent]
    if file.name != str(file) or not (folder := next((place for place in places if (place / file).is_file()), None)):
        raise ValueError(f"{path} is built by {name}; expected {file.name} beside it, or in the run's folder")
    if not trust_code:
        raise ValueError(
            f"{path} is built by {folder / file}, whose code would be executed: read it, then add --trust-code "
            "(partial_fc.load(..., trust_code=True))"
        )
    return folder


def _fp32(t: Tensor) -> Tensor:
    """Copies to fp32: a mapped file may change under the model."""
    return t.float().clone(memory_format=torch.contiguous_format) if t.is_floating_point() else t.clone()
