"""Tables as a whole: columns and labels, prediction on another frame, long form and panels, care."""

import json
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from frame_checks import answer, frame_on, holes, office_hours, refusal, stamps

from dualweaver.data.frames import Layout, future_index, read_table, write_table
from dualweaver.errors import DataError

# --- labels and columns -----------------------------------------------------------------------------------------------


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


# --- prediction on another frame --------------------------------------------------------------------------------------


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


# --- long form and panels ---------------------------------------------------------------------------------------------


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


# --- care -------------------------------------------------------------------------------------------------------------


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
