"""`partial-fc export`: a trained backbone for other programs, compared with ours before it is renamed into place.

I images of a batch, D feature width.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partial_fc.comm import SingleWorld
from partial_fc.files import replacing
from partial_fc.flags import check_numbers
from partial_fc.verbs.model.embed import ModelOptions

if TYPE_CHECKING:
    from torch import Tensor

    from partial_fc.embedding.model import EmbeddingModel

_BATCHES = (1, 5, 2)  # batch sizes that an ONNX file is tested with
_BATCH_SIZE = 32
# fp32: rounding of another summation order; fp16: 11 bits through a hundred layers.
_SMALLEST_COSINE = {"onnx": 1 - 1e-5, "onnx_fp16": 0.999}


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """Writes a trained backbone for other programs. Each file is compared with the model before it has its name, and
    the largest difference printed; --val says what it costs in accuracy.

    The ONNX files have an input "input", float32 (N, 3, H, W), or (N, size) for vectors, with any N, an output
    "embedding" (N, D), not normalised, and in their metadata network, input contract and flip rule. InsightFace's
    ArcFaceONNX reads those of images."""

    onnx: Path | None = None
    """Write ONNX in fp32 here."""
    onnx_fp16: Path | None = None
    """Write ONNX with weights and arithmetic in fp16 here: half the size. Input and output stay fp32."""
    torch: Path | None = None
    """Write arcface_torch's model.pt here: the weights under its names, for torch.load and load_state_dict."""
    val: tuple[Path, ...] = ()
    """Verification sets (.bin): the accuracy of the model and of each ONNX file is printed beside each other."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.files():
            raise ValueError("nothing to write: give --onnx, --onnx-fp16 or --torch, with a file's name")
        if len({path.absolute() for path in self.files().values()}) < len(self.files()):
            raise ValueError("two of the files to write are the same: give each a name of its own")
        for name, path in self.files().items():
            expected = (".pt", ".pth") if name == "torch" else (".onnx",)
            if path.suffix not in expected:
                raise ValueError(f"--{name.replace('_', '-')} {path}: expected a name that ends in {expected[0]}")

    def files(self) -> dict[str, Path]:
        given = {"torch": self.torch, "onnx": self.onnx, "onnx_fp16": self.onnx_fp16}
        return {name: path for name, path in given.items() if path is not None}


def export(options: ExportOptions) -> None:
    """Writes the file. Raises ValueError if the comparison fails, and leaves no file then."""
    from partial_fc.embedding.model import VectorModel
    from partial_fc.evaluate.verification import Verification
    from partial_fc.verbs.model import onnx_model

    model = options.load()
    if isinstance(model, VectorModel):
        if model.name == "none":
            raise ValueError(f"{model}: nothing to export: an embedding is the vector itself, scaled to length 1")
        if options.torch or options.val:
            raise ValueError(f"{model}: networks of vectors are exported by --onnx and --onnx-fp16 only, without --val")
    sets = [Verification(path, model.image_size, 2 * _BATCH_SIZE, flip=model.flip) for path in options.val]
    print(model)
    forwards: dict[str, Callable[[Tensor], Tensor]] = {"model": model.forward}
    with tempfile.TemporaryDirectory(prefix="partial-fc-export-") as folder:
        fp32 = Path(folder) / "fp32.onnx"
        for name, path in options.files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                if name == "torch":
                    difference = _write_torch(model, partial)
                else:
                    if not fp32.exists():
                        onnx_model.write(model, fp32)
                    if name == "onnx":
                        shutil.copyfile(fp32, partial)
                    else:
                        onnx_model.write_fp16(fp32, partial)
                    forwards[name] = onnx_model.forward_of(partial, model.to_input)
                    difference = _compare(forwards[name], model, _SMALLEST_COSINE[name], path)
                size = partial.stat().st_size
            print(f"{path}: {size / 1e6:.1f} MB; {difference}", flush=True)
    for one in sets:
        print(f"accuracy on {one.path}, {len(one.same_N):,} pairs, and its 95 % interval")
        for name, forward in forwards.items():
            values = dict(one.run(forward, SingleWorld()))
            mean, low, high = (values[f"{one.name}/accuracy{part}"] for part in ("", "_low", "_high"))
            print(f"  {name.replace('_', ' '):10} {mean:.5f}  ({low:.5f} to {high:.5f})", flush=True)


def _write_torch(model: "EmbeddingModel", path: Path) -> str:
    """Saves the weights in arcface_torch's format; reads them back with our reader, which runs no code."""
    import torch

    from partial_fc.foreign.state_dicts import read_weights

    weights = {name: t.detach().cpu().contiguous() for name, t in model.network.state_dict().items()}
    torch.save(weights, path)
    again, _ = read_weights(path)
    if again.keys() != weights.keys() or not all(torch.equal(again[name], t) for name, t in weights.items()):
        raise ValueError(f"{path}: reading it back gives other values: the disk or the memory is faulty")
    return f"{len(weights)} arrays under arcface_torch's names, equal when read again"


def _compare(forward: "Callable[[Tensor], Tensor]", model: "EmbeddingModel", smallest: float, path: Path) -> str:
    """Compares features of random inputs, in several batch sizes. Raises ValueError for too small a cosine."""
    import torch
    from torch.nn.functional import cosine_similarity

    generator = torch.Generator().manual_seed(0)
    cosines, differences = [], []
    for size in _BATCHES:
        example_I = model.examples(size, generator)
        ours_ID, theirs_ID = model.forward(example_I).cpu(), forward(example_I)
        if theirs_ID.shape != ours_ID.shape:
            raise ValueError(
                f"{path} is not written: it gives {tuple(theirs_ID.shape)} for {size} images, the model "
                f"{tuple(ours_ID.shape)}"
            )
        cosines.append(cosine_similarity(ours_ID, theirs_ID, eps=0.0).min().item())
        differences.append(((ours_ID - theirs_ID).abs().max() / ours_ID.abs().max()).item())
    found = (
        f"{sum(_BATCHES)} random {model.to_input.unit} in batches of {', '.join(map(str, _BATCHES))}: smallest cosine "
        f"to the model's {min(cosines):.7f}, largest difference {max(differences):.1e} of the largest feature"
    )
    if not min(cosines) >= smallest:
        raise ValueError(f"{path} is not written: {found}; expected a cosine of at least {smallest}")
    return found
