"""The definition of an embedding, f(image) + f(flipped image), scaled to length 1; and EmbeddingModel, a trained
backbone that computes it. I images of a batch, N all of them, D feature width."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from partial_fc.data.decode import fit
from partial_fc.data.sample import BadRecord
from partial_fc.data.vectors import usable
from partial_fc.embedding.images import Image, batches, black, is_one, name_of, pixels_of
from partial_fc.models.inputs import FACE, Pixels


class EmbeddingModel:
    """A trained backbone with its input contract, in fp32 and evaluation mode.

    network: the module, normalised images (I, 3, image_size, image_size) -> features (I, embedding_size). name: as in
    --network. flip: add the flipped image. source: the file or checkpoint of origin; step: of its training, None:
    unknown.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        embedding_size: int,
        image_size: int,
        *,
        to_input: Pixels = FACE,
        flip: bool = True,
        source: Path,
        step: int | None = None,
    ):
        # As in training by default: the same convolutions give the same bits.
        self.network = network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.name, self.embedding_size, self.image_size = name, embedding_size, image_size
        self.to_input, self.flip = to_input, flip
        self.source, self.step = source, step
        self.device = torch.device("cpu")

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        flip = "with" if self.flip else "without"
        return (
            f"{self.source}: {self.name}, {self.image_size} x {self.image_size} pixels -> {self.embedding_size} "
            f"features, {flip} the mirrored image{step}"
        )

    def facts(self) -> dict[str, str]:
        """Returns what a file of the network states about it, under the keys of `load`."""
        facts = {
            "network": self.name,
            "embedding_size": str(self.embedding_size),
            "image_size": str(self.image_size),
            "output": "float32 (N, embedding_size), not normalised",
            **self.to_input.facts(),
            "flip": "true" if self.flip else "false",
        }
        return facts if self.step is None else {**facts, "step": str(self.step)}

    @property
    def blank(self) -> NDArray:
        """Returns an input as `prepare` makes it, for unusable ones."""
        return black(self.image_size)

    def examples(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns random inputs as a batch of `prepare`d ones."""
        shape = (count, 3, self.image_size, self.image_size)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def is_one(self, images: object) -> bool:
        """Tells a single input from several."""
        return is_one(images)

    def prepare(self, image: Image) -> NDArray:
        """Makes the network's input of an image: uint8 RGB of its size. Raises BadRecord for an unusable one."""
        return fit(pixels_of(image), self.image_size)

    def to(self, device: torch.device | str) -> "EmbeddingModel":
        """Moves the network to a device; returns the model. Raises ValueError if there is no such device."""
        try:
            self.device = torch.device(device)
            self.network.to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
        return self

    @torch.no_grad()
    def forward(self, image_I3HW: Tensor) -> Tensor:
        """Maps uint8 RGB images (I, 3, H, W) on any device to features (I, D), not normalised, without flip."""
        return self.network(self.to_input(image_I3HW.to(self.device, non_blocking=True)))

    def embed(
        self,
        images: Image | Iterable[Image],
        batch_size: int = 64,
        flip: bool | None = None,
        on_error: Literal["raise", "nan"] = "raise",
    ) -> NDArray[np.float32]:
        """Returns embeddings of length 1, (N, D): their products are cosines.

        images: paths, files' bytes, RGB pixels (uint8 (H, W, 3)) or Pillow images, one or any number of them; for
        another size than the network's, the shorter side is resized and the middle cropped. batch_size: images per
        forward. flip: None: the model's own. on_error: for an unusable image: "raise" a ValueError that names it, or
        "nan", which makes its row NaN. Raises ValueError for an embedding of length 0, NaN or Inf.
        """
        if batch_size < 1 or on_error not in ("raise", "nan"):
            raise ValueError(f"batch_size {batch_size}, on_error {on_error!r}; expected at least 1, 'raise' or 'nan'")
        given: list[Image] = []  # of the batches read ahead, for their names

        def each() -> Iterable[Image]:
            for image in [images] if self.is_one(images) else images:  # type: ignore[union-attr]
                given.append(image)  # type: ignore[arg-type]
                yield image  # type: ignore[misc]

        rows, num_done = [np.empty((0, self.embedding_size), np.float32)], 0
        for image_I3HW, bad in batches(each(), self.prepare, self.blank, batch_size):
            names = [name_of(image, num_done + i) for i, image in enumerate(given[: len(image_I3HW)])]
            del given[: len(image_I3HW)]
            if on_error == "raise":
                for i, error in bad.items():
                    raise BadRecord(f"{names[i]}: {error}") from error
            rows.append(self.embed_pixels(image_I3HW, flip))
            self.check(rows[-1], bad, names.__getitem__)
            rows[-1][list(bad)] = np.nan
            num_done += len(image_I3HW)
        return np.concatenate(rows)

    def embed_pixels(self, image_I3HW: Tensor, flip: bool | None = None, unit: bool = True) -> NDArray[np.float32]:
        """Returns embeddings (I, D) of uint8 RGB images of the network's size; NaN for zero features. unit: scale to
        length 1, else keep the network's length."""
        embed = unit_embeddings if unit else sum_of_views
        return embed(self.forward, image_I3HW, self.flip if flip is None else flip)[0].float().numpy()

    def check(self, row_ID: NDArray[np.float32], bad: Iterable[int], name: Callable[[int], str]) -> None:
        """Raises ValueError, with the image's name, for a NaN or Inf embedding of an image that is not in `bad`."""
        broken = set(np.flatnonzero(~np.isfinite(row_ID).all(axis=1)).tolist()) - set(bad)
        if broken:
            bad_weights = [key for key, t in self.network.state_dict().items() if not t.isfinite().all()]
            why = f"{bad_weights[0]} has NaN or Inf: training diverged" if bad_weights else "its weights are finite"
            raise ValueError(
                f"{name(min(broken))}: its embedding has NaN or Inf, or length 0 ({len(broken)} of "
                f"{len(row_ID)} in its batch), by the network of {self.source}; {why}"
            )


def unit_embeddings(
    forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns (embeddings of length 1 (I, D), mean length (I,) of the network's outputs for an image), float64 on the
    host.

    forward: uint8 RGB images (I, 3, H, W) on the host -> features (I, D), not normalised; in evaluation mode. flip: add
    the flipped image; off if that is of another class. Zero features give NaN.
    """
    sum_ID, norm_I = sum_of_views(forward, image_I3HW, flip)
    return sum_ID / sum_ID.norm(dim=1, keepdim=True), norm_I


def sum_of_views(forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the same with the network's length, for templates that weigh their images by it."""
    views = [image_I3HW, image_I3HW.flip(3)] if flip else [image_I3HW]
    feats = [forward(view).double().cpu() for view in views]
    norm_I = torch.stack([feat_ID.norm(dim=1) for feat_ID in feats]).mean(0)
    return torch.stack(feats).sum(0), norm_I


class VectorModel(EmbeddingModel):
    """As EmbeddingModel, for vectors of image_size numbers, one (image_size,) or several (N, image_size)."""

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.source}: {self.name}, vectors of {self.image_size} -> {self.embedding_size} features{step}"

    def facts(self) -> dict[str, str]:
        facts = super().facts()
        return {**facts, "input_size": facts.pop("image_size")}

    @property
    def blank(self) -> NDArray[np.float32]:
        return np.zeros(self.image_size, np.float32)

    def examples(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(count, self.image_size, generator=generator)

    def is_one(self, images: object) -> bool:
        return np.ndim(images) < 2  # type: ignore[arg-type]

    def prepare(self, image: Any) -> NDArray[np.float32]:
        if not isinstance(image, np.ndarray) or image.shape != (self.image_size,):
            what = f"an array {image.shape}" if isinstance(image, np.ndarray) else f"{type(image).__name__}, an image"
            raise BadRecord(f"{what}; expected a vector of {self.image_size} numbers")
        row = np.asarray(image, np.float32)
        if not usable(row[None])[0]:
            raise BadRecord("NaN or Inf, or only zeros; expected a vector")
        return row
