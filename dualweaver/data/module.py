"""Training and validation windows for Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dualweaver.data.windows import WindowDataset, whole_batch

__all__ = ["PhasedSampler", "WindowDataModule", "stride_for"]


class _NumberedWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows together with their positions, so that what is known of a window can be kept."""

    def __init__(self, windows: WindowDataset) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(indices), self.windows.__getitems__(indices)


class PhasedSampler(Sampler[int]):
    """Every `stride`-th window an epoch, shuffled, starting at another phase each epoch.

    Strided windows make an epoch cheap; moving the phase lets training see all of them over the epochs, except fewer
    than `stride` at the very start: epochs are of one length, since Lightning counts the batches of the first one only.
    A pure function of seed and epoch, so that a resumed training continues with the same windows.
    """

    def __init__(self, windows: int, stride: int, seed: int) -> None:
        self.windows, self.stride, self.seed = windows, min(stride, windows), seed
        self.epoch = 0
        self.phases = torch.randperm(self.stride, generator=torch.Generator().manual_seed(seed)).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _positions(self) -> Tensor:
        first = self.windows % self.stride + self.phases[self.epoch % self.stride]
        return torch.arange(first, self.windows, self.stride)

    def __len__(self) -> int:
        return self.windows // self.stride

    def __iter__(self) -> Iterator[int]:
        positions = self._positions()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from positions[torch.randperm(len(positions), generator=generator)].tolist()


class WindowDataModule(L.LightningDataModule):
    """Windows of `context_length + horizon` steps, as views of the tables.

    Args:
        train, validation: the windows; validation is read in order, in large batches.
        stride: of the training windows, see `PhasedSampler`.
        batch_size: windows that go through the model at once in training.
        validation_batch_size: the same in validation.
        seed: of the order of training windows.
    """

    def __init__(
        self,
        train: WindowDataset,
        validation: WindowDataset,
        *,
        stride: int = 1,
        batch_size: int = 32,
        validation_batch_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.train_windows, self.validation_windows = train, validation
        self.stride, self.seed = stride, seed
        self.batch_size, self.validation_batch_size = batch_size, validation_batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            _NumberedWindows(self.train_windows),
            batch_size=self.batch_size,
            sampler=PhasedSampler(len(self.train_windows), self.stride, self.seed),
            collate_fn=whole_batch,
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self.validation_windows, batch_size=self.validation_batch_size, shuffle=False, collate_fn=whole_batch
        )


def stride_for(windows: int, wanted: int) -> int:
    """The stride that leaves about `wanted` of so many windows."""
    return max(1, math.ceil(windows / max(1, wanted)))
