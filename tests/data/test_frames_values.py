"""Values of real tables: missing ones, infinities, and all that means numbers."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from frame_checks import frame_on, holes, refusal, stamps

from dualweaver.data.frames import future_index, read_table
from dualweaver.errors import SettingError

# --- missing values ---------------------------------------------------------------------------------------------------


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


# --- types ------------------------------------------------------------------------------------------------------------


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
