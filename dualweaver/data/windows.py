"""Windows over a long table: views into one tensor, gathered a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dualweaver.errors import SettingError

__all__ = ["WindowDataset", "stack_channels", "whole_batch", "window_starts"]

_Batch = TypeVar("_Batch")


def window_starts(segment_lengths: Sequence[int], length: int, stride: int = 1) -> npt.NDArray[np.int64]:
    """First rows of all windows of ``length`` rows that lie inside one segment, in ascending order.

    ``segment_lengths`` are the rows of the segments (entities, channels) in the order in which they are concatenated;
    no window crosses from one to the next, and a segment shorter than a window has none. The stride is counted from
    the end of each segment, so that its most recent window is always there: a segment of ``n >= length`` rows has
    ``(n - length) // stride + 1`` windows.
    """
    if length < 1 or stride < 1:
        raise SettingError(f"window length and stride must be at least 1, not {length} and {stride}")
    starts: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    offset = 0
    for rows in segment_lengths:
        starts.append(offset + np.arange(rows - length, -1, -stride, dtype=np.int64)[::-1])
        offset += rows
    return np.concatenate(starts)


class WindowDataset(Dataset[Tensor]):
    """Windows ``[length, channel]`` of one table ``[time, channel]``, without copying it.

    Args:
        values: the table, ``[time, channel]``; several segments are concatenated in time.
        starts: first row of each window, see `window_starts`.
        length: rows of a window.

    Fetching whole batches (`__getitems__`, which `torch.utils.data.DataLoader` prefers) costs one gather and no
    Python loop over windows; pass ``collate_fn=whole_batch`` to the loader, since the batch needs no collating.
    """

    def __init__(self, values: Tensor, starts: npt.ArrayLike | Tensor, length: int) -> None:
        if values.ndim != 2:
            raise SettingError(f"values must be [time, channel], not {list(values.shape)}")
        if not 1 <= length <= len(values):
            raise SettingError(f"window length {length} does not fit a table of {len(values)} rows")
        self.values = values
        self.starts = torch.as_tensor(starts, dtype=torch.int64)
        self.length = length
        if len(self.starts) and not 0 <= int(self.starts.min()) <= int(self.starts.max()) <= len(values) - length:
            raise SettingError(f"starts must lie in 0 ... {len(values) - length} for windows of {length} rows")

    @property
    def windows(self) -> Tensor:
        """Every window of the table, valid or not, as a view ``[time - length + 1, length, channel]``."""
        return self.values.unfold(0, self.length, 1).transpose(1, 2)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        """One window ``[length, channel]``, a view."""
        start = int(self.starts[index])
        return self.values[start : start + self.length]

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """The windows of a batch, ``[batch, length, channel]``: the only place where values are copied."""
        return self.windows[self.starts[torch.as_tensor(indices, dtype=torch.int64)]]


def whole_batch(batch: _Batch) -> _Batch:
    """``collate_fn`` over a `WindowDataset`: the batch as it is (a function, so that workers can pickle it)."""
    return batch


def stack_channels(values: Tensor) -> tuple[Tensor, list[int]]:
    """A table ``[time, channel]`` as one long series ``[channel * time, 1]`` and its segment lengths.

    Each channel becomes a segment, so a `WindowDataset` over it yields univariate windows in channel-major order:
    window ``t`` of channel ``c`` has the index ``c * windows_per_channel + t``. That is how the published protocol
    fine-tunes a univariate backbone on a multivariate table.
    """
    time, channels = values.shape
    return values.T.reshape(channels * time, 1), [time] * channels
