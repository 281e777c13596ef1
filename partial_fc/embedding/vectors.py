"""VectorModel, a trained backbone that takes vectors."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.data.sample import BadRecord
from partial_fc.data.vectors import usable
from partial_fc.embedding.model import EmbeddingModel


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
