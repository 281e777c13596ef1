"""State dicts of torch modules and optimizers in files, ours and other programs': readers and checks. No code runs."""

import pickle
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from partial_fc.file_kind import TEXT, it_is, kind_of_file
from partial_fc.files import check_regular
from partial_fc.foreign import ir_blocks
from partial_fc.foreign.unknown_classes import Unknown, load, tensors_of
from partial_fc.printable import some

# torch's additions to names of wrapped modules, at any depth: torch.compile, FSDP, activation checkpointing.
_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Common attribute names of a network; `module` is DistributedDataParallel's.
_HOLDERS = ("module", "model", "backbone", "net", "network", "encoder")


def is_state_dict(value: Any) -> TypeGuard[dict[str, Tensor]]:
    """Tells whether a value is a dictionary of tensors by name."""
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under the network's own names, if saved from a module that wraps or holds it:
    "module._orig_mod.conv1.weight", "model.backbone.conv1.weight". Drops that module's other parts, such as a head; the
    network is the part with the most tensors."""
    found = dict(weights)
    for wrapped in _WRAPPED:
        renamed = {name.replace(wrapped, ""): t for name, t in found.items()}
        found = renamed if len(renamed) == len(found) else found
    while found:
        holder, count = Counter(name.partition(".")[0] for name in found).most_common(1)[0]
        if holder not in _HOLDERS or 2 * count <= len(found):
            break
        found = {name.partition(".")[2]: t for name, t in found.items() if name.startswith(f"{holder}.")}
    return found


def check_fits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, model: str) -> None:
    """Checks that weights have the names and shapes of a model's state dict. Raises ValueError, with what is missing,
    unexpected or of another shape."""
    if problems := misfits(weights, expected):
        raise ValueError(f"{path} does not fit this {model}: {problems}. {_cause(weights, expected)}")


def _cause(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Returns what names and shapes tell: another network, or the same one of other sizes."""
    if shared := expected.keys() & weights.keys():
        if shared != weights.keys() | expected.keys():
            return f"It is another network, or a part of one: {len(shared)} of {len(expected)} names are the same"
        pairs = [(weights[name].shape, expected[name].shape) for name in shared]
        differ = [(theirs, ours) for theirs, ours in pairs if theirs != ours]
        if all(len(theirs) == len(ours) > 0 for theirs, ours in differ):
            if not differ:
                return "Its numbers are integers or complex, of 8 bits perhaps: save it as float32"
            if all(theirs[1:] == ours[1:] for theirs, ours in differ):
                return "It is the same network with another number of outputs (embedding size, or classes)"
            if all(theirs[0] == ours[0] for theirs, ours in differ):
                return "It is the same network for another image size"
    return "It is another network"


def misfits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Lists what is missing, unexpected or of another shape or kind, up to eight names each; empty if all match."""
    reshaped = [
        f"{name} is {_kind(weights[name])}, expected {_kind(t)}"
        for name, t in expected.items()
        if name in weights and _kind(weights[name]) != _kind(t)
    ]
    problems = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of another shape or kind": reshaped,
    }
    return "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in problems.items() if names)


def fitting(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights that match a name, shape and kind of a model's state dict."""
    return {name: t for name, t in weights.items() if name in expected and _kind(t) == _kind(expected[name])}


def parameter_states(optimizer: Any, path: Path) -> list[dict[str, Any]]:
    """Returns an optimizer state dict's entries per parameter, in order. Raises ValueError for anything else."""
    try:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        states = [dict(optimizer["state"].get(number, {})) for number in numbers]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: its optimizer is no torch state dict (expected 'state' and 'param_groups')"
        ) from error
    # Older versions of torch wrote None for momentum before the first step.
    return [{str(name): value for name, value in state.items() if value is not None} for state in states]


def check_parameter_state(state: Mapping[str, Any], shape: Sequence[int], number: int, path: Path) -> None:
    """Checks that an optimizer's state of a parameter has its shape, and that "step" is a number."""
    for name, value in state.items():
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not (is_number if name == "step" else actual == tuple(shape)):
            raise ValueError(
                f"{path}: {name} of parameter {number} has shape {actual}, the parameter {tuple(shape)}: another "
                "model, or another order of its parameters"
            )


def _kind(t: Tensor) -> str:
    """Returns shape, and whether the dtype is real (any width), as weights are."""
    return f"{tuple(t.shape)}{'' if t.is_floating_point() else ' complex' if t.is_complex() else ' of integers'}"


# Keys of the weights in a whole checkpoint: arcface_torch's, Lightning's, and common hand-written ones.
_KEYS = ("state_dict_backbone", "state_dict", "model_state_dict", "model")
_REMEDY = "in its own program: torch.save(model.state_dict(), FILE)"


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads (state dict, what the file states about it, maybe a note) from a .safetensors, ONNX or torch.save file: a
    state dict, a checkpoint, of which the backbone counts, or a whole model, whose tensors are read. Drops prefixes of
    wrappers and larger modules; gives IR networks our names. Executes no code in a file. Raises ValueError for anything
    else."""
    kind = kind_of_file(path)
    if path.suffix == ".onnx" or kind == "an ONNX model":
        from partial_fc.foreign import onnx_file

        return onnx_file.read(path)
    if path.suffix == ".safetensors" or kind == "a safetensors file":
        check_regular(path)
        try:
            with safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return _under_our_names(weights, file.metadata() or {}, path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or cut short: {error}{it_is(path)}") from error
    found = load_torch(path)
    parts = [found.get(key) for key in _KEYS] if isinstance(found, dict) else []
    plain = (dict(tensors_of(part)) or part for part in (*parts, found))
    weights = next((part for part in plain if is_state_dict(part) and part), {})
    if not weights:
        keys = map(str, found) if isinstance(found, dict) else [type(found).__name__]
        raise ValueError(
            f"{path}: expected a state dict (name -> tensor), or a checkpoint with one as {', '.join(_KEYS)}, got: "
            f"{', '.join(keys)[:200]}; {_REMEDY}"
        )
    return _under_our_names(weights, {}, path)


def _under_our_names(
    weights: dict[str, Tensor], facts: dict[str, str], path: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    found = without_prefix(weights)
    if not ir_blocks.are_in(found):
        return found, facts
    is_adaface = any(name.endswith("head.kernel") for name in weights)
    note = "the weights of an IR network, under the names of our iresnet; "
    note += "AdaFace's take BGR: the first convolution is turned round to take RGB" if is_adaface else "RGB is assumed"
    return ir_blocks.to_iresnet(found, path, is_adaface), {**facts, "note": note}


def load_state(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Loads a state dict, which came from `path`, in place. Raises ValueError, with what is missing, unexpected or of
    another shape, before changing anything."""
    check_fits(weights, model.state_dict(), path, type(model).__name__)
    # Without torch's layer versions: names suffice, and a damaged file may contain anything there.
    model.load_state_dict(dict(weights))


_MOST_SEARCHED = 2000  # characters of torch's messages
_REFUSED = {  # by torch's words
    r"unsupported GLOBAL (\S{1,200})": "it asks for {}, which reaches into the system: an attack, or no checkpoint",
    r"(TorchScript) archive": "it is a {} archive, a program; where you trust it, torch.save(torch.jit.load(FILE)"
    ".state_dict(), 'model.pt')",
    r"load (DTensors)": "it has one rank's part of tensors ({}): save them whole, with full_state_dict=True",
    r"(Invalid magic number)": f"it is a pickle, none of torch.save; {_REMEDY}",
    r"Unsupported operand (\d+)": "it is damaged, or saved with another pickle_protocol than 2 (operation {})",
}


def load_torch(path: str | Path) -> Any:
    """Loads a file onto the CPU; since torch 1.6 tensors are read on use. Values of other classes are `Unknown`, which
    executes nothing. Raises ValueError, which names the file, for damage; OSError as open does."""
    check_regular(path)
    try:
        found = load(path)
    except OSError:
        raise
    except Exception as error:  # torch's unpickler raises nearly any error for damaged files
        raise ValueError(f"{path} cannot be read as tensors and plain values: {_reason(error, path)}") from error
    _check_tensors(path, found)
    return found


def _reason(error: Exception, path: str | Path) -> str:
    """Returns why a file is rejected: torch's message without preamble and advice to run the file's code."""
    words = re.sub(r"\x1b\[\d*m", "", str(error)[:_MOST_SEARCHED])
    kind = "it is text" if kind_of_file(path) == TEXT else it_is(path).removeprefix("; ")
    if kind and not re.search("torch.save|pickle|zip", kind):
        return kind
    for pattern, text in _REFUSED.items():
        if asked := re.search(pattern, words):
            return text.format(asked[1])
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in words:
        return f"it is damaged or cut short, or no file of torch.save; {_REMEDY}"
    line = words.strip().partition("\n")[0] or type(error).__name__
    return f"{textwrap.shorten(line, 300, placeholder=' ...')} ({_REMEDY})"


def _check_tensors(path: str | Path, found: Any) -> None:
    left, seen = [found], set()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
            if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError(
                    f"{path}: a tensor of shape {tuple(value.shape)} that is sparse, quantised, or repeats few stored "
                    "numbers; save plain ones (t.contiguous())"
                )
        elif isinstance(value, (dict, list, tuple, Unknown)) and id(value) not in seen:
            seen.add(id(value))
            parts = value.content if isinstance(value, Unknown) else value
            left.extend(parts.values() if isinstance(parts, dict) else parts)
