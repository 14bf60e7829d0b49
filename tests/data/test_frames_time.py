"""Time stamps of real tables, in and out: frequencies, zones, gaps and written dates."""

from datetime import date

import numpy as np
import pandas as pd
import pytest
from frame_checks import answer, frame_on, office_hours, refusal, stamps

from dualweaver.data.frames import read_table
from dualweaver.errors import SettingError

ALIASES = ["s", "15min", "h", "6h", "D", "B", "W-SUN", "W-WED", "2W-MON", "MS", "ME", "BME", "QS-JAN", "QE-DEC"]
ALIASES += ["YS-JAN", "YE-DEC", "10D", "250ms"]


# --- frequencies and time zones ---------------------------------------------------------------------------------------


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


# --- the time axis ----------------------------------------------------------------------------------------------------


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
