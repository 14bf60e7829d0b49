"""Frames in and out: the input situations of real tables, each as a sentence."""

import json
import tracemalloc
import warnings
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dualweaver.data.frames import Layout, Table, future_index, read_table, write_table
from dualweaver.errors import DataError, DualWeaverError, SettingError

ALIASES = ["s", "15min", "h", "6h", "D", "B", "W-SUN", "W-WED", "2W-MON", "MS", "ME", "BME", "QS-JAN", "QE-DEC"]
ALIASES += ["YS-JAN", "YE-DEC", "10D", "250ms"]


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


# --- frequencies and time zones -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_the_future_continues_the_index_as_pandas_would(alias):
    whole = pd.date_range("2019-01-01", periods=64, freq=alias)
    table = read_table(frame_on(pd.DatetimeIndex(whole[:60].to_numpy())))
    assert alias.startswith("Q") or table.layout.freq == whole.freqstr  # quarters have several names
    assert table.report.clean
    assert answer(table).index.tolist() == whole[60:].tolist()


@pytest.mark.parametrize("alias", ALIASES)
def test_a_few_missing_rows_are_inserted_with_a_notice(alias):
    whole = pd.date_range("2019-01-01", periods=64, freq=alias)
    df = frame_on(pd.DatetimeIndex(whole[:60].delete([3, 4, 17, 40]).to_numpy()))
    with pytest.warns(UserWarning, match=r"4 steps of .* had no row"):
        table = read_table(df)
    (block,) = table.blocks
    assert block.index.tolist() == whole[:60].tolist()
    assert np.flatnonzero(~block.observed.all(axis=1)).tolist() == [3, 4, 17, 40]
    assert np.isfinite(block.values).all()
    assert table.report.rows_inserted == 4
    assert answer(table).index.tolist() == whole[60:].tolist()


def test_01_hourly_stamps_across_the_october_change_stay_one_hour_apart_in_real_time():
    index = stamps("2021-10-20", periods=500, freq="h", tz="Europe/Amsterdam")
    table = read_table(frame_on(index))
    ahead = answer(table, 48).index
    assert str(ahead.tz) == "Europe/Amsterdam"
    assert set(np.diff(index.append(ahead).as_unit("s").asi8)) == {3600}
    assert table.layout.tz == "Europe/Amsterdam"


@pytest.mark.parametrize("last", ["2021-03-27 20:00", "2021-10-30 20:00"])
def test_01_the_future_crosses_a_change_of_the_clock(last):
    index = pd.date_range(end=pd.Timestamp(last, tz="Europe/Amsterdam"), periods=200, freq="h")
    ahead = answer(read_table(frame_on(index)), 24).index
    assert set(np.diff(ahead.as_unit("s").asi8)) == {3600}
    assert len({stamp.utcoffset() for stamp in ahead}) == 2


@pytest.mark.parametrize("alias", ["D", "B", "W-SUN", "MS", "ME"])
def test_01_days_and_longer_keep_their_wall_clock_time(alias):
    whole = pd.date_range("2021-01-01", periods=130, freq=alias, tz="America/New_York")
    table = read_table(frame_on(pd.DatetimeIndex(pd.Series(whole[:60]).array)))
    assert table.layout.freq == alias
    assert answer(table, 70).index.tolist() == whole[60:].tolist()


def test_01_days_counted_in_another_zone_are_24_hours_long():
    whole = pd.date_range("2021-01-01", periods=400, freq="D", tz="UTC").tz_convert("Europe/Amsterdam")
    table = read_table(frame_on(pd.DatetimeIndex(pd.Series(whole[:380]).array)))
    assert table.layout.freq == "24h"
    assert answer(table, 20).index.tolist() == whole[380:].tolist()


@pytest.mark.parametrize("zone", ["America/Sao_Paulo", "Asia/Beirut", "Africa/Cairo"])
def test_01_a_day_without_midnight_is_no_irregularity(zone):
    days = pd.date_range("2014-01-01", periods=1600, freq="D")
    whole = days.tz_localize(zone, nonexistent="shift_forward", ambiguous=np.ones(len(days), bool))
    for cut in range(1000, 1500, 7):
        table = read_table(frame_on(whole[:cut], "a"))
        assert table.layout.freq == "D"
        assert answer(table, 100).index.tolist() == whole[cut : cut + 100].tolist()


def test_02_a_repeated_time_stamp_is_named_with_its_count():
    index = stamps("2021-10-20", periods=500, freq="h", tz="Europe/Amsterdam")
    df = frame_on(index.append(index[[7, 7, 9]]))
    message = refusal(df.sort_index())
    assert "2021-10-20 07:00:00+02:00" in message
    assert "3 times" in message
    assert "3 surplus" in message


def test_03_business_days_are_recognised_and_holidays_tolerated():
    index = stamps("2021-01-01", periods=100, freq="B")
    assert read_table(frame_on(index)).layout.freq == "B"
    with pytest.warns(UserWarning, match="3 steps of 'B'"):
        table = read_table(frame_on(index.delete([10, 41, 77])))
    assert table.layout.freq == "B"
    assert answer(table, 40).index.day_of_week.max() == 4


def office_hours():
    index = stamps("2021-01-01", periods=24 * 30, freq="h")
    return frame_on(index[(index.hour >= 8) & (index.hour <= 18)])


def test_04_hours_of_the_day_alone_are_refused_with_an_explanation():
    message = refusal(office_hours())
    assert "384 have no row" not in message  # the grid starts and ends with a row
    assert "377 have no row" in message
    assert "29 gaps, typically 13 steps long, the first after 2021-01-01 18:00:00" in message
    assert "freq='h'" in message
    assert "reset_index" in message


def test_04_a_given_frequency_fills_the_gaps_and_says_so():
    with pytest.warns(UserWarning, match="377 steps of 'h'"):
        table = read_table(office_hours(), freq="h")
    assert table.report.rows_inserted == 377
    assert len(table.blocks[0].index) == 30 * 11 + 377
    assert "377 steps without a row" in refusal(office_hours(), freq="h", missing="raise")


def test_scattered_stamps_are_refused_and_a_given_frequency_moves_them():
    shift = np.random.default_rng(0).integers(-600, 600, 100)
    df = frame_on(stamps("2021-01-01", periods=100, freq="h") + pd.to_timedelta(shift, "s"))
    message = refusal(df)
    assert "irregular" in message
    assert "freq='h'" in message
    with pytest.warns(UserWarning, match="moved to the nearest step"):
        table = read_table(df, freq="h")
    assert table.blocks[0].index.tolist() == pd.date_range("2021-01-01", periods=100, freq="h").tolist()
    assert "more than one row" in refusal(df, freq="3h")


def test_readings_at_any_hour_belong_to_their_day():
    hours = np.random.default_rng(0).integers(0, 24, 50)
    df = frame_on(stamps("2021-01-01", periods=50, freq="D") + pd.to_timedelta(hours, "h"))
    with pytest.warns(UserWarning, match="moved"):
        table = read_table(df, freq="D")
    assert table.blocks[0].index.tolist() == pd.date_range("2021-01-01", periods=50, freq="D").tolist()


def test_the_same_day_of_each_month_is_told_to_become_periods():
    assert "to_period('M')" in refusal(frame_on(stamps("2020-01-01", periods=20, freq="MS") + pd.Timedelta(days=14)))
    shifted = stamps("2020-01-01", periods=20, freq="MS") + pd.to_timedelta([0, 1] * 10, "h")
    assert "to_period('M')" in refusal(frame_on(shifted))


@pytest.mark.parametrize(
    "freq", ["nonsense", 3, -1, True, "-1D", "0D", pd.offsets.CustomBusinessDay(holidays=["2021-01-06"])]
)
def test_a_frequency_that_cannot_be_used_is_refused(freq):
    with pytest.raises(SettingError, match="freq="):
        read_table(frame_on(stamps("2021-01-01", periods=20, freq="D")), freq=freq)


def test_a_frequency_that_does_not_fit_says_which_does():
    assert "freq='W-MON', which fits" in refusal(frame_on(stamps("2021-01-01", periods=20, freq="W-MON")), freq="W")


def test_a_frequency_that_would_fill_memory_is_refused_first():
    index = stamps("2001-01-01", periods=200, freq="30D")
    assert "nearly all of them without a row" in refusal(frame_on(index), freq="s")
    assert "gaps" in refusal(frame_on(pd.Index([0, 1, 2, 10**15])))


def test_the_frequency_that_pandas_knows_is_believed():
    table = read_table(frame_on(pd.date_range("2021-01-01", periods=2, freq="W-TUE")))
    assert table.layout.freq == "W-TUE"
    assert "pass freq=" in refusal(frame_on(stamps("2021-01-01", periods=2, freq="D")))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_resolution_of_the_stamps_is_kept(unit):
    table = read_table(frame_on(stamps("2021-01-01", periods=20, freq="h").as_unit(unit)))
    assert answer(table).index.unit == unit


# --- missing values -------------------------------------------------------------------------------------------------


def holes(share=0.05):
    df = frame_on(stamps("2021-01-01", periods=400, freq="h"))
    return df.mask(np.random.default_rng(1).random(df.shape) < share)


def test_05_missing_values_are_filled_per_channel_on_the_common_grid():
    df = holes()
    table = read_table(df)
    (block,) = table.blocks
    assert block.index.equals(df.index)
    assert np.array_equal(block.observed, df.notna().to_numpy())
    assert np.array_equal(block.values[block.observed], df.to_numpy()[block.observed])
    np.testing.assert_allclose(block.values, df.interpolate(limit_direction="both").to_numpy())
    assert table.report.missing == df.isna().sum().to_dict()


def test_05_ffill_repeats_the_last_value():
    df = holes()
    assert np.array_equal(read_table(df, missing="ffill").blocks[0].values, df.ffill().bfill().to_numpy())


def test_05_raise_names_the_columns_and_the_counts():
    df = holes().assign(c=1.0)
    message = refusal(df, missing="raise")
    assert f"'a' ({df.a.isna().sum()}), 'b' ({df.b.isna().sum()})" in message
    assert "'c'" not in message
    read_table(df.fillna(0), missing="raise")
    with pytest.raises(SettingError, match="interpolate"):
        read_table(df, missing="drop")


def test_06_a_column_without_any_value_is_named():
    df = holes()
    df["b"] = np.nan
    assert refusal(df).startswith("'b' has no value at all")
    assert "'b'" in refusal(df.assign(b=np.inf))
    assert "'b'" in refusal(df.assign(b=-9999), missing_values=[-9999])


def test_07_a_column_that_starts_late_leaves_the_others_alone():
    df = frame_on(stamps("2021-01-01", periods=1000, freq="h"))
    df.iloc[:300, 1] = np.nan
    table = read_table(df)
    assert np.array_equal(table.blocks[0].values[:, [0, 2]], df[["a", "c"]].to_numpy())
    assert (table.blocks[0].values[:300, 1] == df["b"].iloc[300]).all()


def test_15_wide_ranges_of_numbers_pass_unchanged():
    df = frame_on(stamps("2021-01-01", periods=50, freq="h")) * [1e-9, 1.0, 1e12]
    assert np.array_equal(read_table(df).blocks[0].values, df.to_numpy())


def test_22_infinities_are_filled_with_a_notice_or_refused_by_name():
    df = frame_on(stamps("2021-01-01", periods=50, freq="h"))
    df.iloc[[3, 4], 0] = np.inf
    df.iloc[7, 1] = -np.inf
    with pytest.warns(UserWarning, match="infinite values in 'a', 'b'"):
        table = read_table(df)
    assert np.isfinite(table.blocks[0].values).all()
    assert table.report.infinite == {"a": 2, "b": 1}
    assert table.report.missing == {}
    assert "infinite values in 'a' (2), 'b' (1)" in refusal(df, missing="raise")


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "Int64", "object", "string", "category"])
def test_values_that_stand_for_missing_are_filled(dtype):
    df = pd.DataFrame({"a": [1, -9999, 3, 4, -9999, 6]}).astype(str if dtype == "string" else int).astype(dtype)
    for listed in ([-9999], -9999, [-9999, "?"]):
        table = read_table(df, missing_values=listed)
        assert table.blocks[0].values[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
        assert table.report.sentinels == {"a": 2}
        assert table.report.missing == {}
    assert "listed in missing_values in 'a' (2)" in refusal(df, missing_values=[-9999], missing="raise")


def test_a_rounded_sentinel_is_still_found():
    df = pd.DataFrame({"a": np.array([1, -99.9, 3], dtype=np.float32), "b": ["1", "?", "3"]})
    table = read_table(df, missing_values=[-99.9, "?"])
    assert table.blocks[0].values.tolist() == [[1, 1], [2, 2], [3, 3]]


# --- types ----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "float32": np.array([1, 0, 2], dtype=np.float32),
    "int8": np.array([1, 0, 2], dtype=np.int8),
    "uint64": np.array([1, 0, 2], dtype=np.uint64),
    "bool": [True, False, True],
    "text": ["12.5", " 3", "1e3"],
    "string": pd.array(["12.5", "3", pd.NA], dtype="string"),
    "category": pd.Categorical([1.5, 2.5, 1.5]),
    "category of text": pd.Categorical(["1.5", "2.5", "1.5"]),
    "nullable int": pd.array([1, pd.NA, 3], dtype="Int64"),
    "nullable bool": pd.array([True, pd.NA, False], dtype="boolean"),
    "nullable float": pd.array([1.5, pd.NA, 3.0], dtype="Float32"),
    "sparse": pd.arrays.SparseArray([1.0, 0.0, 2.0]),
    "Decimal": [Decimal("1.5"), Decimal(2), None],
    "mixed": [1, "2.5", Decimal(3)],
    "blank": ["1", " ", "n/a"],
    "big int": [2**70, 1, 2],
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_11_whatever_means_numbers_is_cast(kind):
    df = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": NUMBERS[kind]})
    table = read_table(df)
    expected = [np.nan if str(v).strip() in ("", "n/a", "<NA>", "None") else float(v) for v in df["b"]]
    known = np.isfinite(expected)
    assert np.array_equal(table.blocks[0].values[known, 1], np.array(expected)[known])
    assert np.array_equal(table.blocks[0].observed[:, 1], known)
    assert ("b" in table.report.casts) == (kind not in ("float32", "int8", "uint64"))


def test_11_arrow_columns_are_cast_too():
    pytest.importorskip("pyarrow")
    hours = pd.Series(pd.date_range("2021-01-01", periods=3, freq="h"))
    df = pd.DataFrame({"date": hours.astype("timestamp[us][pyarrow]"), "b": pd.array([1, None, 3], "int64[pyarrow]")})
    table = read_table(df)
    assert table.blocks[0].values.tolist() == [[1], [2], [3]]
    assert table.layout.freq == "h"


NOT_NUMBERS = {
    "NW": ["NW", "1", "2"],
    "12,5": ["12,5", "1", "2"],
    "x": pd.Categorical(["x", "1", "2"]),
    "(1+2j)": [1 + 2j, 3, 4],
    "0 days 01:00:00": pd.to_timedelta(["1h", "2h", "3h"]),
    "[1]": [[1], [2], [3]],
    "10000000": [10**400, 1, 2],
    "2021-01": pd.period_range("2021-01", periods=3, freq="M"),
}


@pytest.mark.parametrize("example", NOT_NUMBERS)
def test_11_what_is_not_a_number_is_named_with_an_example(example):
    wind = NOT_NUMBERS[example]
    wind = pd.Series(wind, dtype=object if isinstance(wind, list) else None)
    df = pd.DataFrame({"a": [1.0, 2.0, 3.0], "wind": wind}).set_index(stamps("2021", periods=3, freq="D"))
    message = refusal(df)
    assert "column 'wind'" in message
    assert example in message
    assert "drop" in message
    assert "column 'a'" not in message


def test_27_tables_without_rows_or_numbers_are_refused():
    df = frame_on(stamps("2021-01-01", periods=20, freq="D"))
    assert "no rows" in refusal(df.iloc[:0])
    assert "no rows" in refusal(pd.DataFrame())
    assert "no numeric column" in refusal(df[[]])
    assert "no numeric column" in refusal(pd.DataFrame({"date": df.index.astype(str)}))
    assert "no numeric column" in refusal(pd.DataFrame({"city": ["Delft"] * 20}, index=df.index))
    assert "DataFrame" in refusal([1, 2, 3])
    assert "DataFrame" in refusal(df.to_numpy())


@pytest.mark.parametrize("horizon", [0, -1])
def test_27_the_future_has_at_least_one_step(horizon):
    table = read_table(frame_on(range(9)))
    with pytest.raises(SettingError, match="horizon"):
        future_index(table.layout, table.blocks[0].index, horizon)


def test_the_future_ends_where_pandas_dates_end():
    table = read_table(frame_on(stamps("2200-01-01", periods=20, freq="YS").as_unit("ns")))
    with pytest.raises(SettingError, match="last date"):
        future_index(table.layout, table.blocks[0].index, 100)


# --- the time axis --------------------------------------------------------------------------------------------------


def test_23_unsorted_rows_are_sorted_with_a_notice():
    df = frame_on(stamps("2021-01-01", periods=50, freq="h"))
    with pytest.warns(UserWarning, match="sorted by time"):
        table = read_table(df.sample(frac=1, random_state=0))
    assert table.report.sorted
    assert np.array_equal(table.blocks[0].values, df.to_numpy())
    assert table.blocks[0].index.equals(df.index)


@pytest.mark.parametrize(
    "index",
    [
        pd.RangeIndex(50),
        pd.RangeIndex(10, 510, 10, name="step"),
        pd.Index(np.arange(7, 57), name="n"),
        pd.period_range("2001-01", periods=50, freq="M", name="month"),
        pd.period_range("2001-01", periods=50, freq="Q-NOV"),
        pd.period_range("2001-01-01", periods=50, freq="2h"),
    ],
    ids=str,
)
def test_24_the_future_index_is_of_the_same_kind(index):
    table = read_table(frame_on(index[:40]))
    ahead = answer(table, 10).index
    pd.testing.assert_index_equal(ahead, index[40:], exact="equiv")
    if isinstance(index, pd.RangeIndex):
        assert isinstance(ahead, pd.RangeIndex)


def test_24_gaps_in_numbers_and_periods_are_handled_like_those_in_stamps():
    with pytest.warns(UserWarning, match="2 steps of 10"):
        table = read_table(frame_on(pd.Index(np.delete(np.arange(0, 500, 10), [4, 9]))))
    assert table.layout.freq == 10
    with pytest.warns(UserWarning, match="1 steps of 'M'"):
        read_table(frame_on(pd.period_range("2001-01", periods=50, freq="M").delete(7)))
    assert "irregular" in refusal(frame_on(pd.Index([0, 2, 4, 7, 8, 10])))
    assert "contradicts" in refusal(frame_on(pd.period_range("2001-01", periods=50, freq="M")), freq="D")
    assert "time_column" in refusal(frame_on(range(5)), freq="h")


def dated(texts, **kwargs):
    return pd.DataFrame({"date": texts, "a": np.arange(len(texts), dtype=float)}, **kwargs)


@pytest.mark.parametrize(
    "form",
    ["%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M", "%d %b %Y %H:%M"],
)
@pytest.mark.parametrize("start", ["2009-01-01", "2009-02-01"])
def test_dates_as_text_are_found_and_read_right(form, start):
    index = pd.date_range(start, periods=24 * 20, freq="h")
    table = read_table(dated(index[:400].strftime(form)))
    assert table.layout.time_column == "date"
    assert table.blocks[0].index.tolist() == index[:400].tolist()
    out = answer(table)
    assert out.columns.tolist() == ["date", "a"]
    assert out["date"].tolist() == index[400:404].tolist()


def test_dates_that_read_two_ways_are_refused():
    message = refusal(dated(pd.date_range("2009-02-01", periods=24, freq="h").strftime("%d/%m/%Y %H:%M")))
    assert "dayfirst" in message


@pytest.mark.parametrize(
    "texts", [[200901, 200902, 200903], ["200901", "200902", "200903"], [20090129, 20090130, 20090131]]
)
def test_dates_written_as_numbers_are_not_continued_as_numbers(texts):
    message = refusal(dated(texts))
    assert "pd.to_datetime" in message
    assert "format=" in message


@pytest.mark.parametrize(
    "values",
    [
        [date(2021, 1, day) for day in range(1, 11)],
        [pd.Timestamp(2021, 1, day).to_pydatetime() for day in range(1, 11)],
        pd.Categorical([f"2021-01-{day:02d}" for day in range(1, 11)]),
        [f"202101{day:02d}" for day in range(1, 11)],
        pd.date_range("2021-01-01", periods=10),
    ],
    ids=["date", "datetime", "category", "compact", "datetime64"],
)
def test_dates_of_any_type_are_read(values):
    table = read_table(dated(values))
    assert table.layout.freq == "D"
    assert answer(table, 1)["date"].tolist() == [pd.Timestamp("2021-01-11")]


def test_mixed_utc_offsets_are_read_as_utc_with_a_notice():
    index = pd.date_range("2021-10-30", periods=60, freq="h", tz="Europe/Amsterdam")
    with pytest.warns(UserWarning, match="read as UTC"):
        table = read_table(dated([str(stamp) for stamp in index]))
    assert table.blocks[0].index.tolist() == index.tolist()
    assert table.layout.tz == "UTC"
    message = refusal(dated([str(stamp) for stamp in index[:5]] + ["2021-11-05 00:00"]))
    assert "with and without a time zone" in message
    days = pd.date_range("2021-10-20", periods=30, freq="D", tz="Europe/Amsterdam")
    assert "tz_convert" in refusal(dated([str(stamp) for stamp in days]))


def test_a_bad_time_is_named_with_its_row():
    assert "'bad' in row 2" in refusal(dated(["2020-01-01", "2020-01-02", "bad"]), time_column="date")
    assert "no time in 1 of 3 rows (the first is row 1)" in refusal(dated(["2020-01-01", None, "2020-01-03"]))
    df = frame_on(pd.DatetimeIndex(["2020-01-01", "NaT", "2020-01-03"]))
    assert "the index has no time in 1 of 3 rows" in refusal(df)
    assert "cannot be read as time" in refusal(frame_on(pd.Index([0.5, 1.5, 2.5])))
    assert "cannot be read as time" in refusal(frame_on(pd.to_timedelta([1, 2, 3], "h")))
    assert "time_column=" in refusal(frame_on(pd.Index(["x", "y", "z"])))
    assert "reset_index" in refusal(frame_on(pd.MultiIndex.from_product([["m"], [1, 2, 3]])))


def test_the_time_column_is_the_one_that_is_named_or_the_only_one():
    days = pd.date_range("2021-01-01", periods=10)
    df = pd.DataFrame({"born": days, "a": 1.0, "seen": days})
    assert "'born', 'seen'" in refusal(df)
    assert "time_column='when' is not a column" in refusal(df, time_column="when")
    table = read_table(df.rename(columns={"seen": "Timestamp"}).drop(columns="born"))
    assert table.layout.time_column == "Timestamp"
    assert answer(table).columns.tolist() == ["a", "Timestamp"]  # in the table's own order
    assert "column 'born' holds" in refusal(df, time_column="seen")
    assert read_table(df[["a"]].set_index(days.rename("day")), time_column="day").layout.freq == "D"


def test_text_beside_the_dates_is_not_taken_for_time():
    df = dated(pd.date_range("2021-01-01", periods=10).astype(str)).assign(time=["00:10"] * 10)
    message = refusal(df)
    assert "column 'time' holds '00:10'" in message


# --- labels and columns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        pd.Index([0, 1, 2]),
        pd.Index(["a", 1, 2.5], dtype=object),
        pd.Index(["x", "y", "z"], name="sensor"),
        pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["site", "sensor"]),
        pd.DatetimeIndex(["2021-01-01", "2021-01-02", "2021-01-03"]),
    ],
    ids=["int", "mixed", "named", "levels", "dates"],
)
def test_labels_of_any_type_are_kept(columns):
    df = frame_on(stamps("2021-01-01", periods=20, freq="D", name="day")).set_axis(columns, axis=1)
    table = read_table(df.rename_axis(index="day"))
    out = answer(table)
    assert out.columns.tolist() == columns.tolist()
    assert out.columns.names == columns.names
    assert out.index.name == "day"
    assert isinstance(out.columns, pd.MultiIndex) == isinstance(columns, pd.MultiIndex)
    assert Layout.from_dict(json.loads(json.dumps(table.layout.to_dict()))) == table.layout


def test_repeated_column_names_are_refused():
    assert "more than one column named 'a'" in refusal(frame_on(stamps("2021", periods=9, freq="D"), "aba"))


def test_quantiles_stand_right_after_their_column():
    table = read_table(frame_on(stamps("2021-01-01", periods=20, freq="D"), "ab"))
    shape = (3, 2)
    index = future_index(table.layout, table.blocks[0].index, 3)
    parts = {"mean": np.zeros(shape), 0.1: np.full(shape, 0.1), 0.95: np.full(shape, 0.95), "-lo-80": np.ones(shape)}
    out: Any = write_table(table.layout, table.columns, [(None, index, parts)])
    names = ["a", "a_q0.1", "a_q0.95", "a-lo-80"]
    assert out.columns.tolist() == names + [name.replace("a", "b", 1) for name in names]
    assert out["b_q0.95"].tolist() == [0.95] * 3
    levels = frame_on(range(9), "ab").set_axis(pd.MultiIndex.from_tuples([("u", "x"), ("v", "")]), axis=1)
    table = read_table(levels)
    out = write_table(table.layout, table.columns, [(None, index, parts)])
    assert out.columns.tolist()[1] == ("u", "x_q0.1")
    assert out.columns.tolist()[5] == ("v_q0.1", "")


def test_a_quantile_never_takes_the_name_of_a_column():
    table = read_table(pd.DataFrame({"a": [1.0, 2.0], "a_q0.1": [1.0, 2.0]}))
    with pytest.raises(DataError, match=r"'a_q0\.1'"):
        answer(table, **{"_q0.1": 0.0})


def test_some_of_the_columns_can_be_written():
    table = read_table(frame_on(stamps("2021-01-01", periods=20, freq="D")))
    index = future_index(table.layout, table.blocks[0].index, 2)
    out = write_table(table.layout, ["c", "b"], [(None, index, {"mean": np.array([[3.0, 2.0], [3.0, 2.0]])})])
    assert out.columns.tolist() == ["b", "c"]
    assert out["c"].tolist() == [3.0, 3.0]


def test_a_series_is_one_column():
    out = answer(read_table(pd.Series(np.arange(9.0), name="load", index=stamps("2021", periods=9, freq="D"))))
    assert out.columns.tolist() == ["load"]


def test_frames_that_turn_into_pandas_are_welcome():
    class Foreign:
        def to_pandas(self):
            return frame_on(range(9))

    assert read_table(Foreign()).columns == ("a", "b", "c")


# --- prediction on another frame ------------------------------------------------------------------------------------


def fitted():
    return read_table(frame_on(stamps("2021-01-01", periods=200, freq="h")))


def again(table, df):
    return read_table(df, layout=table.layout, columns=table.columns)


def test_10_columns_are_matched_by_name():
    table = fitted()
    new = frame_on(stamps("2022-01-01", periods=60, freq="h"))
    read = again(table, new[["c", "a", "b"]])
    assert read.columns == ("a", "b", "c")
    assert np.array_equal(read.blocks[0].values, new.to_numpy())
    message = refusal(new[["c", "a"]], layout=table.layout, columns=table.columns)
    assert "lacks 'b'" in message
    assert "expects 'a', 'b', 'c'" in message
    with pytest.warns(UserWarning, match="'note' was not there"):
        read = again(table, new.assign(note="text"))
    assert np.array_equal(read.blocks[0].values, new.to_numpy())
    assert read.report.ignored == ("note",)


@pytest.mark.parametrize("rows", [1, 2])
def test_14_the_known_frequency_serves_a_table_too_short_to_tell(rows):
    table = again(fitted(), frame_on(stamps("2022-01-01", periods=rows, freq="h")))
    assert table.layout.freq == "h"
    assert answer(table, 1).index.tolist() == [pd.Timestamp("2022-01-01") + rows * pd.Timedelta(hours=1)]


def test_another_frequency_than_the_fitted_is_refused():
    table = fitted()
    for freq in ("2h", "15min", "D", "MS"):
        df = frame_on(stamps("2022-01-01", periods=60, freq=freq))
        assert "fitted on 'h'" in refusal(df, layout=table.layout, columns=table.columns)
    assert "fitted on time stamps" in refusal(frame_on(range(60)), layout=table.layout, columns=table.columns)
    monthly = read_table(frame_on(stamps("2001-01-01", periods=60, freq="MS")))
    assert again(monthly, frame_on(stamps("2022-01-01", periods=9, freq="MS"))).layout.freq == "MS"
    assert "fitted on 'MS'" in refusal(frame_on(stamps("2022", periods=9, freq="QS")), layout=monthly.layout)
    business = read_table(frame_on(stamps("2001-01-01", periods=60, freq="B")))
    assert again(business, frame_on(stamps("2022-01-03", periods=4, freq="D"))).layout.freq == "B"
    odd = stamps("2022-01-01", periods=60, freq="h") + pd.to_timedelta([0] * 50 + [7] * 10, "min")
    assert "10 of 60 stamps are off" in refusal(frame_on(odd), layout=table.layout, columns=table.columns)
    steps = read_table(frame_on(range(60)))
    assert "fitted on 1" in refusal(frame_on(range(0, 60, 2)), layout=steps.layout)
    months = read_table(frame_on(pd.period_range("2001-01", periods=60, freq="M")))
    assert "fitted on 'M'" in refusal(frame_on(pd.period_range("2001", periods=9, freq="D")), layout=months.layout)


def test_gaps_that_were_filled_for_fit_are_filled_for_predict():
    with pytest.warns(UserWarning, match="377 steps"):
        table = read_table(office_hours(), freq="h")
    with pytest.warns(UserWarning, match="steps of 'h'"):
        read = again(table, office_hours().iloc[-30:])
    assert read.layout.freq == "h"


def test_stamps_that_scattered_for_fit_may_scatter_for_predict():
    def scattered(start, rows):
        shift = np.random.default_rng(rows).integers(-600, 600, rows)
        return frame_on(stamps(start, periods=rows, freq="h") + pd.to_timedelta(shift, "s"))

    with pytest.warns(UserWarning, match="moved"):
        table = read_table(scattered("2021-01-01", 100), freq="h")
    for rows in range(3, 60):
        with pytest.warns(UserWarning, match="moved"):
            read = again(table, scattered("2022-01-01", rows))
        assert answer(read, 1).index.tolist() == [pd.Timestamp("2022-01-01") + pd.Timedelta(hours=rows)]


def test_the_answer_has_the_form_of_the_new_question():
    df = frame_on(stamps("2022-01-01", periods=60, freq="h"))
    long = df.rename_axis("ds").reset_index().melt("ds", var_name="unique_id", value_name="y")
    assert again(fitted(), long).layout.form == "long"
    assert answer(again(fitted(), df.rename_axis("at").reset_index())).columns.tolist() == ["at", "a", "b", "c"]


# --- long form and panels -------------------------------------------------------------------------------------------


def long_form(lengths=(50, 50, 50)):
    index = stamps("2021-01-01", periods=max(lengths), freq="h")
    parts = [pd.DataFrame({"unique_id": name, "ds": index[-n:]}) for name, n in zip("xyz", lengths, strict=True)]
    df = pd.concat(parts, ignore_index=True)
    return df.assign(y=np.arange(len(df), dtype=float))


def test_in_the_long_form_every_id_is_a_channel():
    df = long_form()
    table = read_table(df)
    assert table.columns == ("x", "y", "z")
    assert np.array_equal(table.blocks[0].values, df["y"].to_numpy().reshape(3, 50).T)
    out = answer(table, 2, **{"-hi-80": 1.0})
    assert out.columns.tolist() == ["unique_id", "ds", "DualWeaver", "DualWeaver-hi-80"]
    assert out["unique_id"].tolist() == ["x", "x", "y", "y", "z", "z"]
    assert out["ds"].tolist() == [*pd.date_range(df.ds.max(), periods=3, freq="h")[1:]] * 3
    assert Layout.from_dict(json.loads(json.dumps(table.layout.to_dict()))) == table.layout


def test_in_the_long_form_the_order_of_rows_does_not_matter():
    df = long_form()
    with pytest.warns(UserWarning, match="sorted"):
        shuffled = read_table(df.sample(frac=1, random_state=0))
    order = [shuffled.columns.index(name) for name in "xyz"]
    assert np.array_equal(shuffled.blocks[0].values[:, order], read_table(df).blocks[0].values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(df.sort_values(["ds", "unique_id"]))


def test_in_the_long_form_ids_of_other_lengths_are_filled_and_counted():
    with pytest.warns(UserWarning, match="more than half"):
        table = read_table(long_form((50, 40, 10)).astype({"unique_id": "category"}))
    assert table.report.missing == {"y": 10, "z": 40}
    assert table.blocks[0].observed.sum(axis=0).tolist() == [50, 40, 10]
    df = long_form()
    df.loc[3, "y"] = np.inf
    df.loc[60, "y"] = np.nan
    df.loc[[120, 121], "y"] = -1
    with pytest.warns(UserWarning, match="infinite values in 'x'"):
        report = read_table(df, missing_values=[-1]).report
    assert (report.infinite, report.missing, report.sentinels) == ({"x": 1}, {"y": 1}, {"z": 2})


def test_in_the_long_form_mistakes_are_named():
    df = long_form()
    assert "id 'y' has the time stamp 2021-01-01 05:00:00 2 times" in refusal(pd.concat([df, df.iloc[[55]]]))
    assert "column 'unique_id' is empty in 1 rows" in refusal(df.assign(unique_id=[None, *df["unique_id"][1:]]))
    assert "column 'y' holds 'low'" in refusal(df.assign(y="low"))
    assert "column 'ds' has no time" in refusal(df.assign(ds=[pd.NaT, *df["ds"][1:]]))
    with pytest.warns(UserWarning, match="'price' is ignored"):
        read_table(df.assign(price=1.0))
    table = read_table(df)
    assert "lacks 'z'" in refusal(df[df.unique_id != "z"], layout=table.layout, columns=table.columns)
    with pytest.warns(UserWarning, match="'w'"):
        again(table, pd.concat([df, df[df.unique_id == "x"].assign(unique_id="w")]))


def test_the_long_form_takes_numbers_and_periods_as_time():
    df = long_form()
    numbered = df.assign(ds=df.groupby("unique_id").cumcount())
    assert answer(read_table(numbered), 1)["ds"].tolist() == [50] * 3
    periods = df.assign(ds=df["ds"].dt.to_period("h"))
    assert answer(read_table(periods), 1)["ds"].dtype == "period[h]"
    assert read_table(df.set_index("unique_id")).layout.form == "long"


def panel():
    one = frame_on(stamps("2021-01-01", periods=60, freq="h"), "ab", 1).assign(machine="M1")
    two = frame_on(stamps("2021-02-01", periods=30, freq="h"), "ab", 2).assign(machine="M2")
    return pd.concat([one, two])


def test_entities_are_blocks_of_their_own_with_their_own_times():
    df = panel()
    table = read_table(df, entity_column="machine")
    assert [block.entity for block in table.blocks] == ["M1", "M2"]
    assert [len(block.index) for block in table.blocks] == [60, 30]
    for block in table.blocks:
        own = df[df["machine"] == block.entity]
        assert np.array_equal(block.values, own[["a", "b"]].to_numpy())
        assert block.index.tolist() == own.index.tolist()
    out = answer(table, 3)
    assert out.columns.tolist() == ["a", "b", "machine"]
    assert out["machine"].tolist() == ["M1"] * 3 + ["M2"] * 3
    assert out.index[3] == pd.Timestamp("2021-02-02 06:00")
    flat = answer(read_table(df.rename_axis("date").reset_index(), entity_column="machine"), 3)
    assert flat.columns.tolist() == ["date", "a", "b", "machine"]
    assert flat.index.tolist() == list(range(6))


def test_rows_of_entities_may_be_interleaved():
    df = panel().sort_index(kind="stable")
    mixed = pd.concat([df.iloc[::2], df.iloc[1::2]])
    with pytest.warns(UserWarning, match="sorted"):
        table = read_table(mixed, entity_column="machine")
    assert np.array_equal(table.blocks[0].values, read_table(df, entity_column="machine").blocks[0].values)


def test_entities_without_a_time_count_their_rows():
    table = read_table(panel().reset_index(drop=True), entity_column="machine")
    assert [answer(table, 1).index.tolist()] == [[60, 30]]


def test_in_a_panel_mistakes_name_the_entity():
    df = panel()
    assert "entity 'M2' has the time stamp 2021-02-01 00:00:00 2 times" in refusal(
        pd.concat([df, df.iloc[[60]]]).sort_index(), entity_column="machine"
    )
    coarse = df[(df["machine"] == "M1") | (df.index.hour % 3 == 0)]
    assert "entity 'M2'" in refusal(coarse, entity_column="machine")
    assert "'b' of entity 'M2' has no value" in refusal(
        df.assign(b=df["b"].where(df.machine == "M1")), entity_column="machine"
    )
    assert "entity_column='robot' is not a column" in refusal(df, entity_column="robot")
    assert "is empty in 1 rows" in refusal(df.assign(machine=[None, *df.machine[1:]]), entity_column="machine")
    table = read_table(df, entity_column="machine")
    assert "lists" in refusal(df.assign(machine=[[1]] * len(df)), entity_column="machine")
    assert "'machine'" in refusal(df[["a", "b"]], layout=table.layout, columns=table.columns)


def test_an_entity_too_short_to_tell_its_frequency_takes_that_of_the_others():
    df = panel()
    table = read_table(df.iloc[:61], entity_column="machine")
    assert len(table.blocks[1].index) == 1
    assert table.layout.freq == "h"


# --- care -----------------------------------------------------------------------------------------------------------


def test_the_callers_frame_is_never_changed():
    df = holes().sample(frac=1, random_state=0).rename_axis("date").reset_index()
    df["date"] = df["date"].astype(str)
    before = df.copy(deep=True)
    with pytest.warns(UserWarning, match="sorted"):
        table = read_table(df, missing_values=[0.5])
    pd.testing.assert_frame_equal(df, before)
    table.blocks[0].values[:] = 7
    pd.testing.assert_frame_equal(df, before)
    whole = frame_on(stamps("2021", periods=9, freq="D"))
    before = whole.copy(deep=True)
    read_table(whole).blocks[0].values[:] = 7
    pd.testing.assert_frame_equal(whole, before)


def test_28_a_million_rows_cost_no_more_than_three_times_the_frame():
    df = pd.DataFrame(np.zeros((10**6, 8)), index=pd.date_range("2001-01-01", periods=10**6, freq="min"))
    df.iloc[5, 3] = np.nan
    size = df.memory_usage().sum()
    tracemalloc.start()
    try:
        table = read_table(df)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * size  # with the frame itself, three
    assert table.blocks[0].values.shape == (10**6, 8)


def test_a_damaged_layout_is_refused():
    stored = fitted().layout.to_dict()
    for damage in ({"extra": 1}, {"column_names": {"unknown": 1}}):
        with pytest.raises(DataError, match="damaged"):
            Layout.from_dict({**stored, **damage})
    with pytest.raises(DataError, match="cannot be saved"):
        read_table(frame_on(range(9)).set_axis([frozenset("a"), "b", "c"], axis=1)).layout.to_dict()
