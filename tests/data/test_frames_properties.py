"""Frames in and out, for whatever tables hypothesis comes up with."""

import json
import warnings
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualweaver.data.frames import Layout, Table, future_index, read_table, write_table
from dualweaver.errors import DualWeaverError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ROWS, AHEAD = 30, 12  # enough rows that no other frequency explains them

SHORT = ["s", "5s", "250ms", "min", "15min", "h", "5h", "6h", "36h"]
LONG = [
    "D",
    "2D",
    "B",
    "W-SUN",
    "W-THU",
    "2W-MON",
    "MS",
    "ME",
    "BMS",
    "BME",
    "2ME",
    "QS-FEB",
    "QE-DEC",
    "YS-JAN",
    "YE-JUN",
]
ZONES = [
    None,
    "UTC",
    "Europe/Amsterdam",
    "America/New_York",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
]
PERIODS = ["Y-DEC", "Q-NOV", "M", "2M", "W-SUN", "D", "h", "15min", "s"]


@st.composite
def stamp_indexes(draw) -> pd.DatetimeIndex:
    """Regular stamps, `ROWS + AHEAD` of them, made by pandas itself."""
    alias = draw(st.sampled_from(SHORT + LONG))
    start = draw(st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1))).replace(microsecond=0)
    if alias in LONG and draw(st.booleans()):
        start = start.replace(hour=0, minute=0, second=0)
    zone = draw(st.sampled_from(ZONES))
    index = pd.date_range(start, periods=ROWS + AHEAD, freq=alias)
    if zone is not None and alias in SHORT:
        index = index.tz_localize("UTC").tz_convert(zone)
    elif zone is not None:
        index = index.tz_localize(zone, nonexistent="shift_forward", ambiguous=np.ones(len(index), dtype=bool))
    index = index.as_unit(draw(st.sampled_from(["ms", "us", "ns"])))
    return pd.DatetimeIndex(pd.Series(index).array)  # without its frequency, as if from a file


@st.composite
def indexes(draw) -> pd.Index:
    kind = draw(st.sampled_from(["stamps", "stamps", "stamps", "periods", "range", "numbers"]))
    index: pd.Index
    if kind == "stamps":
        index = draw(stamp_indexes())
    elif kind == "periods":
        first = draw(st.datetimes(datetime(1990, 1, 1), datetime(2030, 1, 1)))
        index = pd.period_range(first, periods=ROWS + AHEAD, freq=draw(st.sampled_from(PERIODS)))
    else:
        start, step = draw(st.integers(-(10**12), 10**12)), draw(st.integers(1, 10**6))
        index = pd.RangeIndex(start, start + step * (ROWS + AHEAD), step)
        index = index if kind == "range" else pd.Index(index.to_numpy())
    return index.rename(draw(st.sampled_from([None, "date", "t", 0])))


labels = st.one_of(st.text(max_size=5), st.integers(-3, 10**9), st.tuples(st.text(max_size=3), st.integers(0, 9)))
numbers = st.floats(-1e12, 1e12, allow_subnormal=False)


@st.composite
def frames(draw, index: pd.Index) -> pd.DataFrame:
    """Numbers of several types under labels of several types."""
    names = draw(st.lists(labels, min_size=1, max_size=4, unique_by=str))
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).normal(size=(len(index), len(names))) * 10.0 ** draw(st.integers(-9, 12))
    df = pd.DataFrame(values, index=index).set_axis(pd.Index(names, dtype=object, tupleize_cols=False), axis=1)
    for position in range(len(names)):
        kind = draw(st.sampled_from(["float64", "float32", "int", "text", "bool", "Decimal", "category"]))
        column: Any = df.iloc[:, position]
        if kind == "int":
            column = column.rank().astype(int)
        elif kind == "text":
            column = column.map(repr)
        elif kind == "bool":
            column = column > 0
        elif kind == "Decimal":
            column = column.map(Decimal)
        else:
            column = column.astype(kind)
        df.isetitem(position, column)
    return df


def values_of(df: pd.DataFrame) -> np.ndarray:
    """The numbers of a frame, read one by one."""
    return np.array([[float(cell) for cell in row] for row in df.astype(object).to_numpy()])


def same_index(index: pd.Index, expected: pd.Index) -> None:
    """Equal in kind, stamps, zone, resolution and name; whether pandas remembers a frequency is no matter."""
    assert index.dtype == expected.dtype
    assert index.name == expected.name
    assert index.tolist() == expected.tolist()


def answer(table: Table, horizon: int = AHEAD) -> Any:
    forecasts = []
    for block in table.blocks:
        ahead = future_index(table.layout, block.index, horizon)
        mean = np.arange(horizon * len(table.columns), dtype=float).reshape(horizon, -1)
        forecasts.append((block.entity, ahead, {"mean": mean}))
    return write_table(table.layout, table.columns, forecasts)


@many
@given(st.data())
def test_the_future_continues_any_index_as_pandas_does(data):
    index = data.draw(indexes())
    df = data.draw(frames(index[:ROWS]))
    before = df.copy(deep=True)
    table = read_table(df)
    pd.testing.assert_frame_equal(df, before)
    (block,) = table.blocks
    same_index(block.index, index[:ROWS])
    assert np.array_equal(block.values, values_of(df))
    assert block.observed.all()
    out = answer(table)
    same_index(out.index, index[ROWS:])
    assert out.columns.tolist() == df.columns.tolist()
    assert Layout.from_dict(json.loads(json.dumps(table.layout.to_dict()))) == table.layout


@many
@given(st.data())
def test_the_same_holds_for_a_column_of_times(data):
    index = data.draw(indexes()).rename(None)
    df = pd.DataFrame({"a": np.arange(ROWS, dtype=float), "when": index[:ROWS], "b": 1})
    # As text, stamps lose their zone and keep an offset, which is as good for hours only
    writable = isinstance(index, pd.DatetimeIndex) and (
        index.tz is None or index[1] - index[0] < pd.Timedelta(hours=20)
    )
    if writable and data.draw(st.booleans()):
        df["when"] = df["when"].map(lambda stamp: stamp.isoformat())
    table = read_table(df, time_column="when")
    out = answer(table)
    assert out.columns.tolist() == ["a", "when", "b"]
    assert out["when"].tolist() == index[ROWS:].tolist()
    assert out.index.equals(pd.RangeIndex(AHEAD))


@many
@given(st.data())
def test_lost_rows_come_back_where_they_were(data):
    index = data.draw(indexes())
    lost = data.draw(st.sets(st.integers(1, ROWS - 2), max_size=3))
    values = np.random.default_rng(0).normal(size=(ROWS, 2))
    df = pd.DataFrame(values, index=index[:ROWS], columns=["a", "b"]).drop(index[sorted(lost)])
    table = read_table(df)
    (block,) = table.blocks
    same_index(block.index, index[:ROWS])
    assert set(np.flatnonzero(~block.observed[:, 0])) == lost
    assert table.report.rows_inserted == len(lost)
    assert np.isfinite(block.values).all()
    assert np.array_equal(block.values[block.observed], df.to_numpy().ravel())
    same_index(answer(table).index, index[ROWS:])


@many
@given(st.data())
def test_the_order_of_rows_and_columns_changes_nothing(data):
    index = data.draw(indexes())
    df = data.draw(frames(index[:ROWS]))
    holes = np.random.default_rng(data.draw(st.integers(0, 99))).random(df.shape) < 0.2
    df = df.astype({label: object for label in df.columns if df[label].dtype == bool}).mask(holes)
    policy = data.draw(st.sampled_from(["interpolate", "ffill"]))
    table = read_table(df, missing=policy)
    rows = data.draw(st.permutations(range(ROWS)))
    columns = data.draw(st.permutations(range(df.shape[1])))
    other = read_table(df.iloc[rows, columns], missing=policy)
    assert other.columns == tuple(df.columns[position] for position in columns)
    assert np.array_equal(other.blocks[0].values, table.blocks[0].values[:, columns])
    assert np.array_equal(other.blocks[0].observed, table.blocks[0].observed[:, columns])
    assert other.report.sorted == (rows != sorted(rows))
    again = read_table(df.iloc[:, columns], missing=policy, columns=table.columns, layout=table.layout)
    assert again.columns == table.columns
    assert np.array_equal(again.blocks[0].values, table.blocks[0].values)


@many
@given(st.data())
def test_gaps_are_filled_between_their_neighbours(data):
    cells = st.one_of(numbers, st.sampled_from([np.nan, np.inf, -np.inf, -9999.0]))
    column = data.draw(st.lists(cells, min_size=2, max_size=40))
    df = pd.DataFrame({"a": [*column, 5.0], "b": 7.0})
    table = read_table(df, missing_values=[-9999], missing=data.draw(st.sampled_from(["interpolate", "ffill"])))
    (block,) = table.blocks
    known = np.isfinite(df["a"]) & (df["a"] != -9999)
    assert np.array_equal(block.observed[:, 0], known)
    assert np.array_equal(block.values[known, 0], df["a"][known])
    assert df["a"][known].min() <= block.values[:, 0].min()
    assert block.values[:, 0].max() <= df["a"][known].max()
    report = table.report
    counts = [report.missing.get("a", 0), report.infinite.get("a", 0), report.sentinels.get("a", 0)]
    assert counts == [df["a"].isna().sum(), np.isinf(df["a"]).sum(), (df["a"] == -9999).sum()]
    assert report.clean == known.all()


@some
@given(st.data())
def test_the_long_form_reads_like_the_wide_one(data):
    index = data.draw(indexes()).rename("ds")
    df = pd.DataFrame(np.random.default_rng(0).normal(size=(ROWS, 3)), index=index[:ROWS], columns=["u", "v", "w"])
    long = df.reset_index().melt("ds", var_name="unique_id", value_name="y")[["unique_id", "ds", "y"]]
    rows = data.draw(st.permutations(range(len(long))))
    wide, other = read_table(df), read_table(long.iloc[rows])
    order = [other.columns.index(name) for name in wide.columns]
    assert np.array_equal(other.blocks[0].values[:, order], wide.blocks[0].values)
    out = answer(other)
    assert out["ds"].tolist() == index[ROWS:].tolist() * 3
    assert out["DualWeaver"].tolist() == answer(wide).to_numpy().T.ravel().tolist()


@some
@given(st.data())
def test_entities_are_read_as_if_each_were_alone(data):
    index = data.draw(stamp_indexes())[:ROWS]
    lengths = data.draw(st.lists(st.integers(1, ROWS - 1), max_size=3))
    lengths.insert(data.draw(st.integers(0, len(lengths))), ROWS)
    rng = np.random.default_rng(0)
    parts = {
        number: pd.DataFrame({"machine": number, "a": rng.normal(size=rows)}, index=index[ROWS - rows :])
        for number, rows in enumerate(lengths)
    }
    df = pd.concat(parts.values())
    rows = data.draw(st.permutations(range(len(df)))) if data.draw(st.booleans()) else list(range(len(df)))
    table = read_table(df.iloc[rows], entity_column="machine")
    assert {block.entity for block in table.blocks} == set(parts)
    for block in table.blocks:
        assert isinstance(block.entity, int)
        part = parts[block.entity]
        assert np.array_equal(block.values[:, 0], part["a"])
        assert block.index.tolist() == part.index.tolist()
    out = answer(table)
    assert out["machine"].tolist() == [block.entity for block in table.blocks for _ in range(AHEAD)]


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.complex_numbers(),
    st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1), timezones=st.one_of(st.none(), st.timezones())),
    st.timedeltas(timedelta(-100), timedelta(100)),
    st.decimals(allow_nan=False),
    st.binary(max_size=3),
    st.sampled_from(["2020-01-01", "01/02/2020", "12,5", "inf", "NaN", "1e400", "2020-01-01T00:00+02:00", "20200101"]),
    st.lists(st.integers(), max_size=2),
)


@st.composite
def tables_of_anything(draw) -> pd.DataFrame:
    rows = draw(st.integers(0, 6))
    names = draw(st.lists(st.sampled_from(["a", "b", "date", "ds", "unique_id", "y", 0, ("a", 1), None]), max_size=5))
    columns = []
    for _ in names:
        cells = st.one_of(anything, draw(st.sampled_from(_strategies)))
        values = draw(st.lists(draw(st.sampled_from([anything, cells, *_strategies])), min_size=rows, max_size=rows))
        columns.append(pd.Series(values, dtype=object if draw(st.booleans()) else None))
    df = pd.concat(columns, axis=1) if columns else pd.DataFrame(index=range(rows))
    df.columns = pd.Index(names, dtype=object, tupleize_cols=False)
    shape = draw(st.sampled_from(["plain", "stamps", "anything"]))
    if shape == "stamps":
        stamps = st.datetimes(datetime(2020, 1, 1), datetime(2020, 1, 9)).map(
            lambda stamp: stamp.replace(microsecond=0)
        )
        df.index = pd.DatetimeIndex(draw(st.lists(stamps, min_size=len(df), max_size=len(df))))
    elif shape == "anything":
        df.index = pd.Index(draw(st.lists(anything, min_size=len(df), max_size=len(df))), dtype=object)
    return df


_strategies = [
    st.floats(),
    st.integers(-5, 5),
    st.sampled_from(["1", "2.5", "", "x"]),
    st.sampled_from(["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04"]),
    st.booleans(),
]


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tables_of_anything(),
    st.fixed_dictionaries(
        {},
        optional={
            "time_column": st.sampled_from(["date", "a", ("a", 1), "gone"]),
            "entity_column": st.sampled_from(["b", "unique_id", 0]),
            "freq": st.sampled_from(["h", "D", "B", "MS", 1, "s"]),
            "missing": st.sampled_from(["interpolate", "ffill", "raise"]),
            "missing_values": st.lists(st.sampled_from([-1, "x", np.nan, None, 2.5]), max_size=2),
            "columns": st.lists(st.sampled_from(["a", "b", "y"]), min_size=1, unique=True),
        },
    ),
)
def test_any_table_is_read_or_refused_in_one_line(df, arguments):
    before = df.copy(deep=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = read_table(df, **arguments)
    except DualWeaverError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 1500
    else:
        for block in table.blocks:
            assert block.values.shape == block.observed.shape == (len(block.index), len(table.columns))
            assert block.values.dtype == np.float64
            assert np.isfinite(block.values).all()
            assert block.index.is_monotonic_increasing
            assert block.index.is_unique
        out = answer(table, 3)
        assert len(out) == 3 * len(table.blocks) * (len(table.columns) if table.layout.form == "long" else 1)
    pd.testing.assert_frame_equal(df, before)
