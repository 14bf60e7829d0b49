"""The estimator: scikit-learn's contract, the forms of a forecast, saving and loading."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted
from toys import CONTEXT, HORIZON, Toy, long_form, waves, weaver
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import coverage, mae, mqloss

from dualweaver import DualWeaver, load_backbone
from dualweaver.errors import CheckpointError, DataError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS = ["dualweaver", "adapts", "fine-tune", "zero-shot"]


def panel(entities: Any = ("x", "y", "z"), rows: int = 200) -> pd.DataFrame:
    """Three machines with two sensors each, rows of all of them mixed."""
    parts = [waves(rows, "ab", seed=seed).assign(machine=name) for seed, name in enumerate(entities)]
    return pd.concat(parts).rename_axis("time").reset_index().sort_values("time", kind="stable", ignore_index=True)


# --- scikit-learn ---------------------------------------------------------------------------------------------------


def test_the_constructor_only_stores_what_it_is_given():
    names = [name for name in inspect.signature(DualWeaver.__init__).parameters if name != "self"]
    settings: dict[str, Any] = {name: object() for name in names}
    model = DualWeaver(**settings)
    assert vars(model) == settings
    assert model.get_params(deep=False) == settings
    assert all(inspect.signature(DualWeaver).parameters[name].default is not inspect.Parameter.empty for name in names)


def test_clone_and_set_params_give_an_unfitted_forecaster_that_fits_alike():
    model = weaver().fit(waves())
    twin = clone(model)
    assert not hasattr(twin, "pipeline_")
    pd.testing.assert_frame_equal(twin.fit(waves()).predict(), model.predict())
    assert twin.set_params(horizon=3, seed=5) is twin
    assert twin.get_params()["horizon"] == 3
    with pytest.raises(ValueError, match="colour"):
        twin.set_params(colour="red")


@pytest.mark.parametrize("call", ["predict", "plot", "save", "backtest"])
def test_an_unfitted_forecaster_says_so(call):
    with pytest.raises(NotFittedError, match="not fitted"):
        getattr(DualWeaver(), call)(*([waves()] if call in ("save", "backtest") else []))


def test_fitted_state_ends_in_an_underscore_and_a_failed_fit_changes_none_of_it():
    model = weaver()
    before = set(vars(model))
    model.fit(waves())
    check_is_fitted(model)
    assert all(name.endswith("_") for name in set(vars(model)) - before)
    assert model.n_features_in_ == 3
    expected = model.predict()
    with pytest.raises(DataError):
        model.fit(waves(20))
    pd.testing.assert_frame_equal(model.predict(), expected)


def test_a_fitted_forecaster_can_be_copied_and_the_caller_keeps_frame_and_backbone():
    df, toy = waves(), Toy()
    frame, weights = df.copy(), load_backbone(copy.deepcopy(toy), context_length=CONTEXT).fingerprint()
    model = weaver(toy, adapter="fine-tune").fit(df)
    pd.testing.assert_frame_equal(copy.deepcopy(model).predict(), model.predict())
    model.predict(df, level=[80])
    pd.testing.assert_frame_equal(df, frame)
    assert load_backbone(toy, context_length=CONTEXT).fingerprint() == weights
    assert model.pipeline_.backbone.fingerprint() != weights


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_silence_is_complete(adapter, capfd, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = weaver(adapter=adapter, verbose=False).fit(waves())
        model.predict(level=[80])
        model.backtest(waves(), windows=2)
        model.plot()
        model.save(tmp_path / "saved")
        DualWeaver.load(tmp_path / "saved", backbone=Toy())
    assert capfd.readouterr() == ("", "")


def test_progress_and_summary_go_to_standard_error(capfd):
    weaver(verbose=True).fit(waves())
    out, err = capfd.readouterr()
    assert out == ""
    assert "dualweaver: epoch 2/2" in err
    assert "validation MSE" in err


def test_notices_point_at_the_line_of_the_user():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = weaver(horizon=9).fit(waves().sample(frac=1, random_state=0))
        model.predict(waves(columns="abcx"), horizon=20)
    assert {warning.filename for warning in caught} == {__file__}
    assert len(caught) == 4


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_backbone_object_can_be_fed_a_shorter_context_but_no_longer_one():
    backbone = load_backbone("fracast", context_length=64)
    model = weaver(backbone, context_length=40, adapter="zero-shot").fit(waves())
    assert model.context_length_ == 40
    with pytest.raises(SettingError, match=r"context_length=65: .*8 to 64 steps"):
        weaver(backbone, context_length=65).fit(waves())


def test_targets_come_in_the_order_asked_for_and_a_single_one_needs_no_list():
    assert weaver(targets=["c", "a"]).fit(waves()).targets_ == ("c", "a")
    assert weaver(targets="b").fit(waves()).predict().columns.tolist() == ["b"]


def test_a_double_precision_module_works():
    forecast = weaver(Toy().double()).fit(waves()).predict()
    np.testing.assert_allclose(forecast, weaver().fit(waves()).predict(), rtol=1e-3)


# --- the forms of a forecast ----------------------------------------------------------------------------------------


def test_every_form_of_a_table_gives_the_same_forecast_in_its_own_form():
    df = waves()
    model = weaver(adapter="zero-shot")
    wide = model.fit(df).predict()
    column = model.fit(df.rename_axis("when").reset_index()).predict()
    assert column.columns.tolist() == ["when", "a", "b", "c"]
    pd.testing.assert_frame_equal(column.set_index("when"), wide, check_names=False, check_freq=False)
    named = model.set_params(time_column="when").fit(df.rename_axis("when").reset_index()[["a", "when", "b", "c"]])
    assert named.predict().columns.tolist() == ["a", "when", "b", "c"]
    long = model.set_params(time_column=None).fit(long_form(df)).predict()
    assert long.columns.tolist() == ["unique_id", "ds", "DualWeaver"]
    pivoted = long.pivot(index="ds", columns="unique_id", values="DualWeaver")  # noqa: PD010
    np.testing.assert_array_equal(pivoted, wide)
    series = model.fit(df["a"]).predict()
    np.testing.assert_allclose(series["a"], wide["a"], rtol=1e-6)  # one series at a time is another matrix product


def test_entities_are_forecast_apart():
    model = weaver(entity_column="machine", adapter="zero-shot").fit(panel())
    forecast = model.predict(level=[80])
    assert forecast["machine"].drop_duplicates().tolist() == ["x", "y", "z"]
    assert forecast.groupby("machine").size().tolist() == [HORIZON] * 3
    alone = weaver(adapter="zero-shot").fit(waves(200, "ab", seed=1)).predict()
    np.testing.assert_allclose(forecast.loc[forecast["machine"] == "y", ["a", "b"]], alone, rtol=1e-4)
    new = panel(["w"], 60)
    assert model.predict(new)["machine"].unique().tolist() == ["w"]


def test_an_entity_too_short_to_train_on_is_forecast_where_it_has_a_context():
    short = panel().query("machine != 'y' or time >= '2024-01-07'")
    assert (short["machine"] == "y").sum() == 56
    short.loc[short["machine"] == "y", "a"] += 1e4
    model = weaver(entity_column="machine", validation_size=60).fit(short)
    assert (model.pipeline_.scaler.mean_ < 100).all()  # all of its rows are validation rows
    assert model.predict().shape == (3 * HORIZON, 4)
    with pytest.raises(DataError, match="entity 'y' has 20 rows: the backbone needs at least 32"):
        model.predict(short[(short["machine"] == "x") | (short["time"] >= "2024-01-08 12:00")])


def test_longer_and_shorter_horizons_agree_where_they_overlap():
    model = weaver().fit(waves())
    whole = model.predict(quantiles=[0.1, 0.9])
    pd.testing.assert_frame_equal(model.predict(horizon=3, quantiles=[0.1, 0.9]), whole.iloc[:3], check_freq=False)
    with pytest.warns(UserWarning, match="native horizon"):
        longer = model.predict(horizon=30, quantiles=[0.1, 0.9])
    pd.testing.assert_frame_equal(longer.iloc[:HORIZON], whole, check_freq=False)
    assert longer.shape == (30, 9)


@pytest.mark.parametrize("backbone", [Toy(), "fracast"])
@pytest.mark.parametrize("adapter", ["dualweaver", "adapts", "zero-shot"])
def test_quantiles_ascend_and_are_named_by_their_level(adapter, backbone):
    model = weaver(backbone, adapter=adapter, max_epochs=1, window_stride=40).fit(waves(200, "ab"))
    forecast = model.predict(quantiles=[0.9, 0.05, 0.5, 0.9])
    assert forecast.columns.tolist() == [f"{c}{q}" for c in "ab" for q in ("", "_q0.05", "_q0.5", "_q0.9")]
    assert (forecast["a_q0.05"] <= forecast["a_q0.5"]).all()
    assert (forecast["a_q0.5"] <= forecast["a_q0.9"]).all()


def test_intervals_are_named_as_in_the_nixtla_libraries():
    model = weaver().fit(waves())
    wide = model.predict(level=[95, 80], quantiles=[0.1])
    suffixes = ["", "_q0.1", "-lo-95", "-lo-80", "-hi-80", "-hi-95"]
    assert wide.columns.tolist() == [f"{column}{suffix}" for column in "abc" for suffix in suffixes]
    pd.testing.assert_series_equal(wide["a_q0.1"], wide["a-lo-80"], check_names=False)
    assert (wide["a-lo-95"] <= wide["a-lo-80"]).all()
    assert (wide["a-hi-80"] <= wide["a-hi-95"]).all()
    assert weaver().fit(long_form(waves())).predict(level=[80, 99.5]).columns.tolist() == [
        *("unique_id", "ds", "DualWeaver"),
        *("DualWeaver-lo-99.5", "DualWeaver-lo-80", "DualWeaver-hi-80", "DualWeaver-hi-99.5"),
    ]


def test_utilsforecast_takes_long_forecasts_as_they_are():
    df = waves(408)
    forecast = weaver().fit(long_form(df.iloc[:400])).predict(level=[80, 95])
    truth = forecast.merge(long_form(df), on=["unique_id", "ds"])
    assert len(truth) == len(forecast)
    scores = evaluate(truth, metrics=[mae, mqloss, coverage], level=[80, 95])
    assert scores["metric"].unique().tolist() == ["mae", "mqloss", "coverage_level80", "coverage_level95"]
    assert scores["DualWeaver"].notna().all()
    plotting = pytest.importorskip("utilsforecast.plotting")
    figure = plotting.plot_series(long_form(df), forecast, level=[80, 95], engine="matplotlib")
    assert len([axis for axis in figure.axes if axis.get_visible()]) >= 3


# --- saving and loading ---------------------------------------------------------------------------------------------


def stamped(index: pd.Index) -> pd.DataFrame:
    return waves(len(index)).set_axis(index)


INDICES: dict[str, Any] = {
    "naive": lambda: stamped(pd.date_range("2024", periods=300, freq="h")),
    "zoned": lambda: stamped(pd.date_range("2024-03-20", periods=300, freq="h", tz="Europe/Amsterdam", name="when")),
    "offset": lambda: stamped(pd.date_range("2024-03-20", periods=300, freq="h", tz="UTC+05:30")),
    "seconds": lambda: stamped(pd.date_range("2024", periods=300, freq="15min", unit="s")),
    "business": lambda: stamped(pd.date_range("2024", periods=300, freq="B")),
    "months": lambda: stamped(pd.period_range("1990-01", periods=300, freq="M", name="month")),
    "range": lambda: stamped(pd.RangeIndex(5, 605, 2)),
    "integers": lambda: stamped(pd.Index(np.arange(300) + 7)),
    "time column": lambda: waves(300).rename_axis("when").reset_index(),
    "long": lambda: long_form(waves(300)),
    "labels of numbers": lambda: waves(300).set_axis([0, 1, 2.5], axis=1),
    "labels of two levels": lambda: waves(300).set_axis(
        pd.MultiIndex.from_tuples([("x", 1), ("x", 2), ("y", 1)], names=["site", "sensor"]), axis=1
    ),
    "labels of dates": lambda: waves(300).set_axis(pd.date_range("2020", periods=3, tz="Asia/Tokyo"), axis=1),
}


@pytest.mark.parametrize("name", INDICES)
def test_what_is_loaded_forecasts_the_same_bits_for_every_form_of_index_and_label(name, tmp_path):
    model = weaver(max_epochs=1).fit(INDICES[name]())
    model.save(tmp_path / "saved")
    loaded = DualWeaver.load(tmp_path / "saved", backbone=Toy())
    pd.testing.assert_frame_equal(loaded.predict(level=[80]), model.predict(level=[80]), check_exact=True)
    pd.testing.assert_frame_equal(loaded.predict(INDICES[name]()), model.predict(INDICES[name]()), check_exact=True)
    pd.testing.assert_frame_equal(loaded.scores_, model.scores_)
    pd.testing.assert_frame_equal(loaded.history_, model.history_)
    assert loaded.columns_ == model.columns_
    assert loaded.plot() is not None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fusion": "cnn", "objective": "paper", "channel_sample": 2},
        {"regularisation": 0.5, "targets": pd.Index(["b"])},
        {"adapter": "adapts", "missing_values": [-9999, float("nan"), "n/a"]},
        {"adapter": "fine-tune"},
        {"fine_tune": True, "freq": pd.Timedelta(hours=1)},
        {"adapter": "zero-shot", "missing_values": np.array([-1])},
    ],
    ids=str,
)
def test_every_adapter_comes_back_with_its_settings(settings, tmp_path):
    model = weaver(max_epochs=1, **settings).fit(waves())
    model.pipeline_.fallback[1:] = False
    model.save(tmp_path / "saved")
    loaded = DualWeaver.load(tmp_path / "saved", backbone=Toy())
    pd.testing.assert_frame_equal(loaded.predict(level=[80]), model.predict(level=[80]), check_exact=True)
    first, again = (each.backtest(waves(), windows=2).forecasts for each in (model, loaded))
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    assert clone(loaded).fit(waves()).predict().equals(weaver(max_epochs=1, **settings).fit(waves()).predict())
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "adapter.safetensors").read_bytes() == (
        tmp_path / "saved" / "adapter.safetensors"
    ).read_bytes()


def test_entities_and_their_names_come_back(tmp_path):
    df = panel([1, 2, 5])
    model = weaver(entity_column="machine", max_epochs=1).fit(df)
    model.save(tmp_path / "saved")
    loaded = DualWeaver.load(tmp_path / "saved", backbone=Toy())
    pd.testing.assert_frame_equal(loaded.predict(), model.predict(), check_exact=True)


def test_a_backbone_with_a_name_is_loaded_by_itself_and_a_module_must_be_handed_in(tmp_path):
    weaver("fracast", adapter="zero-shot").fit(waves()).save(tmp_path / "named")
    assert DualWeaver.load(tmp_path / "named").backbone == "fracast"
    backbone = load_backbone("fracast", context_length=CONTEXT)
    weaver(backbone, adapter="zero-shot").fit(waves()).save(tmp_path / "object")
    assert DualWeaver.load(tmp_path / "object").backbone == "fracast"
    weaver(adapter="zero-shot").fit(waves()).save(tmp_path / "module")
    with pytest.raises(CheckpointError, match="pass it as backbone="):
        DualWeaver.load(tmp_path / "module")
    with pytest.raises(CheckpointError, match="another backbone: module"):
        DualWeaver.load(tmp_path / "module", backbone="fracast")
