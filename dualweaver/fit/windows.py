"""What a fit looks at: training and validation windows of all entities, as views of one scaled table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from sklearn.preprocessing import StandardScaler

from dualweaver.backbones import Backbone
from dualweaver.data.frames import Block
from dualweaver.data.module import stride_for
from dualweaver.data.windows import WindowDataset
from dualweaver.errors import DataError, SettingError
from dualweaver.notices import notify
from dualweaver.settings import FitSettings

__all__ = ["choose_context", "fit_scaler", "make_windows", "validation_start"]

VALUES_AT_ONCE = 2**17  # cells that are scaled in one go: a copy of the whole table would double the memory


def validation_start(rows: int, settings: FitSettings) -> int:
    """First validation row; 0 where an entity is too short to train on."""
    size = settings.validation_size
    return max(0, rows - max(settings.horizon, int(rows * size) if isinstance(size, float) else size))


def _rows_needed(training_rows: int, settings: FitSettings) -> int:
    """The fewest rows of an entity that leave so many before its validation rows."""
    rows = training_rows + settings.horizon
    while validation_start(rows, settings) < training_rows:
        rows += training_rows - validation_start(rows, settings)
    return rows


def choose_context(
    backbone: Backbone, rows: Sequence[int], borders: Sequence[int], future: int, settings: FitSettings
) -> int:
    """The context asked for, shortened where the longest training part has no room for it and `future` steps."""
    wanted = settings.context_length or backbone.context_length
    if not backbone.min_context <= wanted <= backbone.context_length:  # a backbone object, made for another context
        raise SettingError(
            f"context_length={wanted}: the {backbone.name!r} backbone handed in takes {backbone.min_context} to "
            f"{backbone.context_length} steps"
        )
    room = max(borders) - future
    if room >= wanted:
        return wanted
    # half of what is left becomes windows, so that training sees more than a single one
    shortened = max(backbone.min_context, room // 2 if future else room)
    if shortened > room:
        ahead = f"a horizon of {settings.horizon}"
        if future > settings.horizon:
            ahead = f"the {future} steps ahead that the backbone's own loss looks at"
        raise DataError(
            f"{max(rows)} rows are too few: at least {_rows_needed(backbone.min_context + future, settings)} are "
            f"needed for a context of {backbone.min_context} steps (the least that the backbone {backbone.name!r} "
            f"takes), {ahead} and validation_size={settings.validation_size}"
        )
    notify(f"the frame has room for a context of {shortened} steps only, instead of {wanted}")
    return shortened


def fit_scaler(parts: Sequence[npt.NDArray[np.float64]]) -> StandardScaler:
    """Mean and deviation of every channel over the training rows.

    A channel that never moves is scaled by its size instead, so that its later moves are of a harmless size too.
    """
    scaler = StandardScaler()
    for part in parts:
        for rows in _pieces(len(part), part.shape[1]):
            scaler.partial_fit(part[rows])
    still = ~np.isclose(scaler.scale_**2, scaler.var_, rtol=1e-3, atol=0)  # where scikit-learn took 1 for it
    scaler.scale_[still & (scaler.mean_ != 0)] = np.abs(scaler.mean_[still & (scaler.mean_ != 0)])
    return scaler


def _pieces(rows: int, channels: int) -> list[slice]:
    at_once = max(1, VALUES_AT_ONCE // channels)
    return [slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once)]


def make_windows(
    blocks: Sequence[Block],
    borders: Sequence[int],
    scaler: StandardScaler,
    context: int,
    future: int,
    horizon: int,
    wanted: int,
) -> tuple[WindowDataset, WindowDataset]:
    """Training and validation windows, both views of one float32 table `[time, channel]` of all entities.

    Training windows hold `future` steps after the context (0: nothing is trained), validation windows a horizon.
    Validation windows forecast validation rows only; about `wanted` of them are kept.
    """
    values = torch.empty(sum(len(block.index) for block in blocks), blocks[0].values.shape[1])
    heads, tails, first = [], [], 0
    for block, border in zip(blocks, borders, strict=True):
        rows = len(block.index)
        for piece in _pieces(rows, values.shape[1]):
            scaled = torch.from_numpy(scaler.transform(block.values[piece]))
            values[first + piece.start : first + piece.stop] = scaled
        heads.append(range(first, first + border))
        tails.append(range(first + max(0, border - context), first + rows))
        first += rows
    length = context + horizon
    stride = stride_for(sum(map(len, _starts(tails, length))), wanted)
    validation = WindowDataset(values, _listed(_starts(tails, length, stride)), length)
    train = WindowDataset(values, _listed(_starts(heads, context + future) if future else []), context + future)
    for windows, needed in ((train, future), (validation, horizon)):
        if needed and len(windows) == 0:
            raise DataError(
                f"no entity has {windows.length} consecutive rows for a context of {context} and {needed} steps ahead"
            )
    return train, validation


def _starts(segments: Sequence[range], length: int, stride: int = 1) -> list[range]:
    """First rows of the windows inside each segment of a table, as in `window_starts`: counted from its end."""
    lasts = [(rows.start, rows.stop - length) for rows in segments]
    return [range(first + (last - first) % stride, last + 1, stride) for first, last in lasts if last >= first]


def _listed(starts: Sequence[range]) -> torch.Tensor:
    parts = [torch.arange(part.start, part.stop, part.step) for part in starts]
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *parts])
