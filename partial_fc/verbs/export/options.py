"""The flags of `partial-fc export`, without torch, so that help and mistakes cost no seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from partial_fc.flags.numbers import PIXELS, check_numbers


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a trained backbone for other programs. Each file is compared with the model before it has its name, and
    the largest difference printed; --val says what it costs in accuracy.

    The ONNX files have an input "input", float32 (N, 3, H, W) with any N, an output "embedding" (N, D), not
    normalised, and in their metadata network, input contract and flip rule. InsightFace's ArcFaceONNX reads them."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint, model.safetensors, or arcface_torch's model.pt, backbone.pth, checkpoint_gpu_0.pt
    """
    onnx: Path | None = None
    """Write ONNX in fp32 here."""
    onnx_fp16: Path | None = None
    """Write ONNX with weights and arithmetic in fp16 here: half the size. Input and output stay fp32."""
    onnx_int8: Path | None = None
    """Write ONNX with 8-bit weights and values here: a quarter of the size; needs --calibrate."""
    torch: Path | None = None
    """Write arcface_torch's model.pt here: the weights under its names, for torch.load and load_state_dict."""
    calibrate: Path | None = None
    """Images like those that will be embedded, which say the range of each layer's 8-bit values: a folder, a .rec, a
    list."""
    num_calibrate: int = 256
    """Of them that are used, evenly spread."""
    val: tuple[Path, ...] = ()
    """Verification sets (.bin): the accuracy of the model and of each ONNX file is printed beside each other."""
    image_size: int | None = None
    """Of models whose file does not say it; none: the largest that its weights fit."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the model says. It is written into the metadata."""

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS, num_calibrate=1)
        if not self.files():
            raise ValueError("nothing to write: give --onnx, --onnx-fp16, --onnx-int8 or --torch, with a file's name")
        if len({path.absolute() for path in self.files().values()}) < len(self.files()):
            raise ValueError("two of the files to write are the same: give each a name of its own")
        for name, path in self.files().items():
            expected = (".pt", ".pth") if name == "torch" else (".onnx",)
            if path.suffix not in expected:
                raise ValueError(f"--{name.replace('_', '-')} {path}: expected a name that ends in {expected[0]}")
        if (self.onnx_int8 is None) != (self.calibrate is None):
            raise ValueError("--onnx-int8 FILE and --calibrate IMAGES go together: give both, or none")

    def files(self) -> dict[str, Path]:
        given = {"torch": self.torch, "onnx": self.onnx, "onnx_fp16": self.onnx_fp16, "onnx_int8": self.onnx_int8}
        return {name: path for name, path in given.items() if path is not None}
