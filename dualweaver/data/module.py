"""Training and validation windows for Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dualweaver.data.windows import WindowDataset, whole_batch
from dualweaver.errors import SettingError

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

    Of several processes, the one of some `rank` reads its part of every batch: together they see what one process would
    that accumulates `replicas` batches of `batch_size`. Windows that fill no batch of all are left out, others each
    epoch.
    """

    def __init__(
        self, windows: int, stride: int, seed: int, *, batch_size: int = 1, replicas: int = 1, rank: int = 0
    ) -> None:
        self.windows, self.stride, self.seed = windows, min(stride, windows), seed
        self.batch_size, self.replicas, self.rank = batch_size, replicas, rank
        self.epoch = 0
        self.phases = torch.randperm(self.stride, generator=torch.Generator().manual_seed(seed)).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _positions(self) -> Tensor:
        first = self.windows % self.stride + self.phases[self.epoch % self.stride]
        return torch.arange(first, self.windows, self.stride)

    def __len__(self) -> int:
        together = self.replicas * self.batch_size
        windows = self.windows // self.stride
        return windows if self.replicas == 1 else windows // together * self.batch_size

    def __iter__(self) -> Iterator[int]:
        positions = self._positions()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = positions[torch.randperm(len(positions), generator=generator)]
        if self.replicas > 1:
            whole = order[: len(self) * self.replicas]
            order = whole.view(-1, self.replicas, self.batch_size)[:, self.rank].flatten()
        yield from order.tolist()


class WindowDataModule(L.LightningDataModule):
    """Windows of `context_length + horizon` steps, as views of the tables.

    Args:
        train, validation: the windows; validation is read in order, in large batches.
        stride: of the training windows, see `PhasedSampler`.
        batch_size: windows that go through the model at once in training, in each process.
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
        replicas, rank = self._place()
        sampler = PhasedSampler(
            len(self.train_windows),
            self.stride,
            self.seed,
            batch_size=self.batch_size,
            replicas=replicas,
            rank=rank,
        )
        if len(sampler) == 0 and len(self.train_windows) > 0:
            raise SettingError(
                f"{replicas} processes with {self.batch_size} windows each take more windows than the "
                f"{len(self.train_windows) // sampler.stride} of an epoch: use fewer, or a smaller window_stride"
            )
        return DataLoader(
            _NumberedWindows(self.train_windows), batch_size=self.batch_size, sampler=sampler, collate_fn=whole_batch
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        replicas, rank = self._place()
        windows = self.validation_windows
        if replicas > 1:  # the metric adds up over processes
            windows = WindowDataset(windows.values, windows.starts[rank::replicas], windows.length)
        return DataLoader(windows, batch_size=self.validation_batch_size, shuffle=False, collate_fn=whole_batch)

    def _place(self) -> tuple[int, int]:
        """How many processes train, and which one this is."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)


def stride_for(windows: int, wanted: int) -> int:
    """The stride that leaves about `wanted` of so many windows."""
    return max(1, math.ceil(windows / max(1, wanted)))
