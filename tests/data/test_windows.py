"""Windows are views of one table, never cross segments, and come out as plain slicing would give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from dualweaver.data.windows import WindowDataset, stack_channels, whole_batch, window_starts
from dualweaver.errors import SettingError

segments = st.lists(st.integers(0, 30), min_size=1, max_size=5)
lengths = st.integers(1, 12)
strides = st.integers(1, 7)


def table(rows: int, channels: int = 3) -> Tensor:
    return torch.arange(float(rows * channels)).reshape(rows, channels)


@given(segments, lengths, strides)
def test_no_window_crosses_from_one_segment_to_the_next(rows: list[int], length: int, stride: int) -> None:
    segment_of_row = np.repeat(np.arange(len(rows)), rows)
    for start in window_starts(rows, length, stride):
        assert len(set(segment_of_row[start : start + length])) == 1
        assert start + length <= len(segment_of_row)


@given(segments, lengths, strides)
def test_the_number_of_windows_follows_the_formula(rows: list[int], length: int, stride: int) -> None:
    expected = sum((n - length) // stride + 1 for n in rows if n >= length)
    assert len(window_starts(rows, length, stride)) == expected


@given(segments, lengths, strides)
def test_the_most_recent_window_of_every_segment_is_there_whatever_the_stride(
    rows: list[int], length: int, stride: int
) -> None:
    starts = window_starts(rows, length, stride)
    ends = np.cumsum(rows)
    assert {int(end) - length for end, n in zip(ends, rows, strict=True) if n >= length} <= set(starts.tolist())
    assert (np.diff(starts) > 0).all()


@given(segments, lengths, strides, st.data())
def test_a_batch_equals_slices_taken_one_by_one(rows: list[int], length: int, stride: int, data: st.DataObject) -> None:
    values = table(sum(rows) + length)
    windows = WindowDataset(values, window_starts(rows, length, stride), length)
    if len(windows) == 0:
        assert windows.__getitems__([]).shape == (0, length, 3)
        return
    indices = data.draw(st.lists(st.integers(0, len(windows) - 1), min_size=1, max_size=6))
    expected = torch.stack([values[windows.starts[i] : windows.starts[i] + length] for i in indices])
    assert torch.equal(windows.__getitems__(indices), expected)
    assert torch.equal(torch.stack([windows[i] for i in indices]), expected)


def test_windows_share_the_memory_of_the_table() -> None:
    values = table(1000)
    windows = WindowDataset(values, window_starts([1000], 100), 100)
    memory = values.untyped_storage().data_ptr()
    assert windows.values is values
    assert windows.windows.untyped_storage().data_ptr() == memory
    assert windows[5].untyped_storage().data_ptr() == memory
    values[5] = -1.0
    assert (windows[5][0] == -1.0).all()


def test_a_data_loader_fetches_whole_batches_and_every_window_once() -> None:
    values = table(50)
    windows = WindowDataset(values, window_starts([20, 30], 8), 8)
    loader = DataLoader(windows, batch_size=7, shuffle=True, collate_fn=whole_batch)
    batches = list(loader)
    assert all(batch.shape[1:] == (8, 3) for batch in batches)
    first_values = torch.cat(batches)[:, 0, 0].sort().values
    assert torch.equal(first_values, values[windows.starts, 0])


def test_a_data_loader_with_workers_gives_the_same_windows() -> None:
    windows = WindowDataset(table(40), window_starts([40], 8), 8)
    alone, helped = (
        torch.cat(list(DataLoader(windows, batch_size=5, collate_fn=whole_batch, num_workers=workers)))
        for workers in (0, 1)
    )
    assert torch.equal(alone, helped)


def test_stacked_channels_give_univariate_windows_channel_by_channel() -> None:
    values = table(20)
    series, rows = stack_channels(values)
    windows = WindowDataset(series, window_starts(rows, 6), 6)
    per_channel = len(window_starts([20], 6))
    assert len(windows) == 3 * per_channel
    assert torch.equal(windows[2 * per_channel + 4][:, 0], values[4:10, 2])


def test_negative_indices_count_from_the_end_and_too_large_ones_are_refused() -> None:
    windows = WindowDataset(table(10), window_starts([10], 4), 4)
    assert torch.equal(windows[-1], table(10)[6:])
    with pytest.raises(IndexError):
        windows[len(windows)]


@pytest.mark.parametrize(
    ("values", "starts", "length", "message"),
    [
        (torch.zeros(10), [0], 2, r"\[time, channel\]"),
        (torch.zeros(10, 1), [], 11, "does not fit a table of 10 rows"),
        (torch.zeros(10, 1), [], 0, "does not fit"),
        (torch.zeros(10, 1), [7], 4, "0 ... 6"),
        (torch.zeros(10, 1), [-1], 4, "0 ... 6"),
    ],
)
def test_windows_that_do_not_fit_are_refused(values: Tensor, starts: list[int], length: int, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        WindowDataset(values, starts, length)


@pytest.mark.parametrize(("length", "stride"), [(0, 1), (1, 0), (-3, 2)])
def test_a_length_or_stride_below_one_is_refused(length: int, stride: int) -> None:
    with pytest.raises(SettingError, match="at least 1"):
        window_starts([10], length, stride)
