"""What the tests of frames share: frames with an index, forecasts of zeros, refusals in one line."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from dualweaver.data.frames import Table, future_index, read_table, write_table
from dualweaver.errors import DualWeaverError


def stamps(*args, **kwargs):
    """Stamps as they come from a file: no frequency attached."""
    return pd.DatetimeIndex(pd.date_range(*args, **kwargs).to_numpy() if "tz" not in kwargs else zoned(*args, **kwargs))


def zoned(*args, **kwargs):
    return pd.Series(pd.date_range(*args, **kwargs)).array


def frame_on(index, columns="abc", seed=0):
    values = np.random.default_rng(seed).normal(size=(len(index), len(columns)))
    return pd.DataFrame(values, index=index, columns=list(columns))


def answer(table: Table, horizon=4, **parts) -> Any:
    """A forecast of zeros, as a frame; `parts` adds more arrays by key."""
    shape = (horizon, len(table.columns))
    arrays = {"mean": np.zeros(shape), **{key: np.full(shape, value) for key, value in parts.items()}}
    index = [future_index(table.layout, block.index, horizon) for block in table.blocks]
    forecasts = [(block.entity, ahead, arrays) for block, ahead in zip(table.blocks, index, strict=True)]
    return write_table(table.layout, table.columns, forecasts)


def refusal(df, **kwargs) -> str:
    with pytest.raises(DualWeaverError) as caught:
        read_table(df, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def office_hours():
    index = stamps("2021-01-01", periods=24 * 30, freq="h")
    return frame_on(index[(index.hour >= 8) & (index.hour <= 18)])


def holes(share=0.05):
    df = frame_on(stamps("2021-01-01", periods=400, freq="h"))
    return df.mask(np.random.default_rng(1).random(df.shape) < share)
