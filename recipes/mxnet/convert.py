"""`partial-fc convert`: converts backbones of MXNet and of other programs to ours, and compares the embeddings."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from partial_fc.checkpoint.files import save_tensors
from partial_fc.file_kind import it_is, kind_of_file
from partial_fc.files import check_new
from partial_fc.flags.facts import PIXELS, In

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.foreign.networks import Network

    from .backbone_file import State

_PARAMS = re.compile(r"(.+)-\d{4}\.params")
_TORCH = (".pt", ".pth", ".ckpt")
_OURS = (".safetensors", *_TORCH)
_KINDS = ".safetensors (this trainer), .pt, .pth or .ckpt (arcface_torch, AdaFace, ...)"
_READ = ("a file of torch.save", "a pickle", "a safetensors file", "an ONNX model")  # under any name
_NUM_IMAGES = 4
_SMALLEST_COSINE = 1 - 1e-8  # without fixed gammas it is .995, without scale .999998, without epsilon .9999999


@dataclass(frozen=True)
class ConvertOptions:
    """Makes this trainer's model.safetensors or arcface_torch's model.pt of a backbone (r18 to r200, tiny, mini) in
    MXNet's .params, or in the other of both. Embeddings stay the same: random images are embedded before and after, and
    nothing is written if they differ."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """PREFIX-0000.params, X.safetensors (also a checkpoint's backbone.safetensors), X.pt, X.pth or X.ckpt (also
    checkpoint_gpu_R.pt and other programs' files), or X.onnx (InsightFace's)."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """X.safetensors, X.pt, X.pth or X.ckpt."""
    symbol: Path | None = None
    """The symbol of a SOURCE of MXNet, which has the input's scale, epsilons and fixed gammas; none:
    PREFIX-symbol.json beside it, else that of InsightFace's recipe."""
    image_size: Annotated[int | None, In(PIXELS)] = None
    """The network's image size, if several fit its shapes; none: what SOURCE states, else the largest (112 for 97 to
    112)."""


@dataclass(frozen=True)
class _Model:
    """A file's model as our network's state dict, and what computes the file's own embeddings."""

    state: "State"
    network: "Network"
    notes: list[str]
    computed_by: str
    embed: "Callable[[Tensor], Tensor]"  # uint8 images -> embeddings


def convert(options: ConvertOptions) -> None:
    """Converts the files. Raises ValueError for another network, a damaged file, or an existing output."""
    source, output = options.source, options.output
    if source.suffix not in (".onnx", *_OURS) and (source.suffix == ".params" or kind_of_file(source) not in _READ):
        _check_is_params(source)
    if output.suffix not in _OURS:
        raise ValueError(f"{output}: unknown file type; expected {_KINDS}")
    if options.symbol and source.suffix != ".params":
        raise ValueError(f"--symbol goes with a .params file; SOURCE is {source}")
    check_new(output)
    before = _read(source, options.symbol or _symbol_of(source), options.image_size)
    network = before.network
    print(f"{source}: {network.name}, embedding {network.embedding_size}, images {network.image_size}")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Renamed only after the comparison.
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=output.parent) as folder:
        written = Path(folder, output.name)
        _write(before, written, source)
        for note in before.notes:
            print(f"  {note}")
        _compare(before, _read(written, None, network.image_size), output)
        written.replace(output)
    print(f"written: {output}")


def _check_is_params(path: Path) -> None:
    """Raises ValueError for the name of a file that is none of PREFIX-NNNN.params."""
    if path.suffix == ".params":
        if not _PARAMS.fullmatch(path.name):
            raise ValueError(f"{path}: expected PREFIX-0000.params, the name that MXNet's load_checkpoint looks for")
        return
    is_mxnet = kind_of_file(path) == "a .params file of MXNet"
    what = "; rename it PREFIX-0000.params" if is_mxnet else "; it is a folder" if path.is_dir() else ""
    raise ValueError(
        f"{path}: its name tells no kind of file; expected PREFIX-0000.params (MXNet), {_KINDS}{it_is(path)}{what}"
    )


def _symbol_of(path: Path) -> Path | None:
    """Returns the symbol beside a .params file, if there is one."""
    match = _PARAMS.fullmatch(path.name)
    symbol = path.with_name(f"{match[1]}-symbol.json") if match else None
    return symbol if symbol and symbol.exists() else None


# ---- reading


def _read(path: Path, symbol: Path | None, image_size: int | None) -> _Model:
    """Reads a model from a file of either kind. Raises ValueError for another network."""
    from partial_fc.foreign import ndarray_file
    from partial_fc.foreign.state_dicts import check_fits, read_weights

    from . import backbone_file as mxnet_backbone
    from . import symbol_file as mxnet_symbol

    if path.suffix == ".params":
        graph = mxnet_symbol.read(symbol) if symbol else mxnet_symbol.Graph()
        arrays = ndarray_file.read(path)
        network = mxnet_backbone.network_of(arrays, path, image_size)
        state, notes = mxnet_backbone.from_mxnet(arrays, network, graph, path)
        if symbol is None:
            notes.insert(0, "no symbol beside it: the graph of InsightFace's recipe is assumed")
        as_mxnet = partial(mxnet_backbone.embed_as_mxnet, arrays, network, graph, path=path)
        return _Model(state, network, notes, "torch with MXNet's rules", as_mxnet)
    state, contract = read_weights(path)
    said = contract.get("image_size", "")
    if image_size is None and said.isdecimal():
        image_size = int(said)
    network = mxnet_backbone.network_of(state, path, image_size)
    check_fits(state, network.build("meta").state_dict(), path, network.name)
    state = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    notes = [contract["note"]] if "note" in contract else []
    return _Model(state, network, notes, "torch", lambda image: mxnet_backbone.embed(state, network, image))


# ---- writing, and comparing


def _write(found: _Model, path: Path, source: Path) -> None:
    import torch

    from partial_fc.models.inputs import FACE

    if path.suffix in _TORCH:
        torch.save(found.state, path)
        return
    network = found.network
    contract = {
        "network": network.name,
        "embedding_size": str(network.embedding_size),
        "image_size": str(network.image_size),
        "output": "float32 (N, embedding_size), not normalised",
        **FACE.facts(),
        "made_from": source.name,
    }
    save_tensors(found.state, path, contract)


def _compare(before: _Model, after: _Model, output: Path) -> None:
    """Prints the smallest cosine of both models on random images. Raises ValueError if it is too small."""
    import torch
    from torch.nn.functional import cosine_similarity

    size = before.network.image_size
    generator = torch.Generator().manual_seed(0)
    image_B3HW = torch.randint(0, 256, (_NUM_IMAGES, 3, size, size), generator=generator, dtype=torch.uint8)
    before_BD, after_BD = before.embed(image_B3HW), after.embed(image_B3HW)
    if not bool(torch.isfinite(before_BD).all()):
        raise ValueError(
            f"{before.computed_by} gives NaN or Inf, so there is nothing to compare with: the network has diverged"
        )
    smallest = cosine_similarity(before_BD, after_BD, eps=0.0).min().item()
    both = f"{before.computed_by} and then {after.computed_by}"
    print(f"  {_NUM_IMAGES} random images, {both}: smallest cosine {smallest:.8f}")
    if not smallest >= _SMALLEST_COSINE:
        raise ValueError(
            f"the embeddings differ: smallest cosine {smallest:.8f} between {both}, of images of {size} pixels; "
            f"{output} is not written"
        )
