"""Which images recipe `mnist` sees when: a function of (seed, epoch), for any number of reading processes.

The order is that of torch's DistributedSampler: shuffled anew in each epoch, filled up with repeated images so that all
ranks have equally many, dealt out in turn. An epoch has ceil(ceil(N / W) / batch) batches; the last may be smaller, as
much on every rank.
"""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from partial_fc.comm import World
from partial_fc.data.idx import ImageSet
from partial_fc.train.signals import SIGNALS

if TYPE_CHECKING:
    from recipes.mnist_config import Config

Update = list[list[int]]  # batches of image numbers


class Images(Dataset):
    """Whole batches of a set: (image_B1HW uint8, label_B int64)."""

    def __init__(self, found: ImageSet):
        self.image_N1HW = torch.tensor(found.image_NHW).unsqueeze(1)
        self.label_N = torch.tensor(found.label_N)

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:  # what DataLoader asks for a batch with
        return self.image_N1HW[indices], self.label_N[indices]


def updates_of_epoch(config: "Config", num_images: int, world: World, epoch: int) -> list[Update]:
    """This rank's share of an epoch, from `epoch` alone; equally long, with equally large batches, on all ranks."""
    sampler: DistributedSampler = DistributedSampler(
        range(num_images),  # type: ignore[arg-type]  # only its length is asked for
        num_replicas=world.size,
        rank=world.rank,
        seed=config.seed,
    )
    sampler.set_epoch(epoch)
    order = list(sampler)
    in_batches = [order[i : i + config.batch_size] for i in range(0, len(order), config.batch_size)]
    return [in_batches[i : i + config.accumulate] for i in range(0, len(in_batches), config.accumulate)]


def batches(
    images: Images, updates: list[Update], n_workers: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of all updates, one after the other, on the device."""
    loader = DataLoader(
        images,
        batch_sampler=[batch for update in updates for batch in update],
        num_workers=n_workers,
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # `__getitems__` has made a batch of them
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_alone,
    )
    for image_B1HW, label_B in loader:
        yield image_B1HW.to(device, non_blocking=True), label_B.to(device, non_blocking=True)


def _leave_signals_alone(_worker: int) -> None:
    """A launcher sends SIGTERM and SIGUSR1 to whole process groups; the process that trains still needs its readers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def pixels(image_B1HW: Tensor) -> Tensor:
    """uint8 -> float32 from 0 to 1, as torchvision's ToTensor."""
    return image_B1HW.float() / 255


def _as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch
