"""Rolling-origin reports and figures: scores against those worked out by hand, missing cells, panels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from toys import HORIZON, long_form, waves, weaver

from dualweaver.errors import DataError, SettingError
from dualweaver.evaluation.backtest import METHODS, METRIC_NAMES, season_length

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def fitted():
    model = weaver().fit(waves(400))
    model.pipeline_.fallback[:] = False
    return model


def test_the_report_holds_the_forecasts_that_predict_gives_at_every_origin(fitted):
    df = waves(500)
    report = fitted.backtest(df, windows=3, step=5)
    tidy = report.forecasts
    assert len(tidy) == 3 * 3 * HORIZON
    assert tidy["cutoff"].unique().tolist() == [df.index[at] for at in (-HORIZON - 11, -HORIZON - 6, -HORIZON - 1)]
    for cutoff, rows in tidy.groupby("cutoff"):
        expected = fitted.predict(df.loc[:cutoff], level=[80])
        for channel, cells in rows.groupby("unique_id"):
            assert cells["ds"].tolist() == expected.index.tolist()
            assert cells["step"].tolist() == list(range(1, HORIZON + 1))
            np.testing.assert_array_equal(cells["y"], df.loc[cells["ds"], channel])
            np.testing.assert_allclose(cells["DualWeaver"], expected[channel], rtol=1e-5)
            np.testing.assert_allclose(cells["DualWeaver-lo-80"], expected[f"{channel}-lo-80"], rtol=1e-5)
            before = df.loc[:cutoff, channel].iloc[-24:]
            np.testing.assert_array_equal(cells["seasonal-naive"], before.iloc[:HORIZON])


def test_scores_equal_those_worked_out_by_hand(fitted):
    df = waves(500)
    report = fitted.backtest(df, windows=6)
    tidy = report.forecasts
    assert report.scores["metric"].tolist() == list(METRIC_NAMES) * 3
    first = 500 - 6 * HORIZON
    for channel in df:
        cells = tidy[tidy["unique_id"] == channel]
        scale = df[channel].iloc[:first].diff(24).abs().mean()
        for method in METHODS:
            error = cells["y"] - cells[method]
            expected = {
                "mse": (error**2).mean(),
                "mae": error.abs().mean(),
                "rmse": np.sqrt((error**2).mean()),
                "smape": (error.abs() / (cells["y"].abs() + cells[method].abs())).mean(),
                "mase": error.abs().mean() / scale,
            }
            if method != "seasonal-naive":
                expected["coverage_80"] = cells["y"].between(cells[f"{method}-lo-80"], cells[f"{method}-hi-80"]).mean()
                losses = []
                for width in (20, 40, 60, 80):
                    for side, level in (("lo", 0.5 - width / 200), ("hi", 0.5 + width / 200)):
                        miss = cells["y"] - cells[f"{method}-{side}-{width}"]
                        losses.append(np.maximum(level * miss, (level - 1) * miss).mean())
                expected["pinball"] = np.mean(losses)
            for metric, value in expected.items():
                assert report.table(metric).loc[channel, method] == pytest.approx(value, rel=1e-6), metric
    gains = report.table()["gain"]
    assert gains["a"] == pytest.approx(1 - report.table().loc["a", "DualWeaver"] / report.table().loc["a", "zero-shot"])
    assert gains["mean"] == pytest.approx(gains[["a", "b", "c"]].mean())
    by_step = report.steps.query("metric == 'mse'").groupby("unique_id")["DualWeaver"].mean()
    np.testing.assert_allclose(by_step, report.table().loc[["a", "b", "c"], "DualWeaver"])
    assert "mean" in str(report)


def test_cells_that_were_missing_are_not_scored(fitted):
    df = waves(500)
    holes = df.copy()
    holes.iloc[-HORIZON:, 1] = np.nan
    holes.iloc[-3, 2] = np.nan
    tidy = fitted.backtest(holes, windows=2).forecasts
    assert tidy.groupby("unique_id")["y"].count().to_dict() == {"a": 16, "b": 8, "c": 15}
    report = fitted.backtest(holes, windows=1)
    assert report.table().index.tolist() == ["a", "c", "mean"]
    error = tidy.query("unique_id == 'c' and cutoff == cutoff.max()").eval("y - DualWeaver")
    assert report.table().loc["c", "DualWeaver"] == pytest.approx((error**2).mean())
    holes.iloc[-HORIZON:] = np.nan
    with pytest.raises(DataError, match="no known value"):
        fitted.backtest(holes, windows=1)


def test_a_constant_channel_has_no_mase_and_no_warning(fitted):
    table = fitted.backtest(waves(500).assign(b=7.0), windows=2).table("mase")
    assert np.isnan(table.loc["b", "DualWeaver"])
    assert table.loc["a", "DualWeaver"] > 0


def test_zero_shot_in_a_report_is_the_backbone_before_it_was_fine_tuned(fitted):
    plain = weaver(adapter="zero-shot").fit(waves(400)).backtest(waves(500), windows=3)
    for settings in ({"adapter": "fine-tune"}, {"fine_tune": True}):
        report = weaver(**settings).fit(waves(400)).backtest(waves(500), windows=3)
        pd.testing.assert_series_equal(report.table()["zero-shot"], plain.table()["zero-shot"], rtol=1e-5)
        assert not np.allclose(report.table()["DualWeaver"], plain.table()["zero-shot"])


def test_too_few_rows_and_bad_arguments_are_refused_with_what_is_needed(fitted):
    with pytest.raises(DataError, match=r"500 rows; 90 windows .* need 752: lower windows, step or horizon"):
        fitted.backtest(waves(500), windows=90)
    for arguments in ({"windows": 0}, {"step": 0}, {"horizon": -1}):
        with pytest.raises(SettingError, match=next(iter(arguments))):
            fitted.backtest(waves(500), **arguments)
    with pytest.raises(SettingError, match=r"metric='mape': expected one of .*mse"):
        fitted.backtest(waves(500), windows=1).table("mape")


def test_entities_and_long_tables_and_odd_labels_are_reported_apart():
    df = waves(300, "ab")
    both = pd.concat([df.assign(site="x"), df.assign(site="y")]).rename_axis("time").reset_index()
    report = weaver(entity_column="site").fit(both).backtest(both, windows=2)
    assert report.table().index.tolist() == ["x/a", "x/b", "y/a", "y/b", "mean"]
    long = weaver().fit(long_form(df)).backtest(long_form(df), windows=2)
    assert long.table().index.tolist() == ["a", "b", "mean"]
    mixed = waves(300, [1, "1"])
    assert weaver().fit(mixed).backtest(mixed, windows=1).table().index.tolist() == ["1", "'1'", "mean"]
    months = df.set_axis(pd.period_range("2000", periods=300, freq="M"))
    assert weaver().fit(months).backtest(months, windows=1).forecasts["ds"].dtype.kind == "M"


@pytest.mark.parametrize(
    ("freq", "steps"),
    [("h", 24), ("15min", 96), ("2h", 12), ("D", 7), ("B", 5), ("W-SUN", 52), ("MS", 12), ("QE-DEC", 4), ("250ms", 1)],
)
def test_the_season_follows_from_the_frequency(freq, steps):
    assert season_length(freq) == steps
    assert season_length(3) == 1


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["a", "abc", "abcde"])
@pytest.mark.parametrize("form", ["wide", "column", "long", "periods"])
def test_a_plot_has_one_panel_a_channel_with_history_forecast_and_band(form, columns):
    df = waves(200, columns)
    forms = {
        "wide": df,
        "column": df.rename_axis("when").reset_index(),
        "long": long_form(df),
        "periods": df.set_axis(pd.period_range("2000", periods=200, freq="M")),
    }
    model = weaver(max_epochs=1).fit(forms[form])
    wide = model.predict(quantiles=[0.05, 0.5, 0.95])
    for forecast, label in ((None, "80 % interval"), (wide, "90 % interval"), (model.predict(level=[60, 80]), "80 %")):
        figure = model.plot(forecast)
        assert isinstance(figure, Figure)
        assert [axis.get_title(loc="left") for axis in figure.axes] == list(columns)
        labels = figure.axes[0].get_legend_handles_labels()[1]
        assert [labels[0], labels[2]] == ["history", "DualWeaver"]
        assert labels[1].startswith(label)
    assert len(model.plot(model.predict()).axes[0].collections) == 0


def test_a_plot_of_another_frame_shows_that_frame():
    model = weaver(max_epochs=1).fit(waves(200))
    new = waves(60, start="2025-01-01")
    line = model.plot(df=new, columns=["b"], history=20).axes[0].lines[0]
    np.testing.assert_array_equal(line.get_ydata(), new["b"].iloc[-20:])


def test_a_plot_of_several_entities_asks_which_one():
    df = pd.concat([waves(200, "ab", seed=seed).assign(site=seed) for seed in (3, 4)])
    model = weaver(max_epochs=1, entity_column="site").fit(df)
    with pytest.raises(SettingError, match=r"entity=None: .*3, 4"):
        model.plot()
    for forecast in (None, model.predict(level=[80])):
        line = model.plot(forecast, entity=4).axes[1].lines[-1]
        expected = model.predict().query("site == 4")["b"]
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), expected)


def test_what_cannot_be_plotted_is_refused():
    model = weaver(max_epochs=1).fit(waves(200))
    with pytest.raises(SettingError, match=r"columns=\['z'\]"):
        model.plot(columns=["z"])
    with pytest.raises(DataError, match="no forecast of"):
        model.plot(waves(20, "xyz"))
    with pytest.raises(SettingError, match="history=0"):
        model.plot(history=0)


def test_labels_of_two_levels_keep_their_band():
    labels = pd.MultiIndex.from_tuples([("x", "p"), ("x", "q")], names=["site", "sensor"])
    model = weaver(max_epochs=1).fit(waves(200, "ab").set_axis(labels, axis=1))
    assert len(model.plot().axes[0].collections) == 1


def test_a_report_draws_the_error_by_step(fitted):
    figure = fitted.backtest(waves(500), windows=3).plot("mae")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["a", "b", "c"]
    assert figure.axes[0].get_legend_handles_labels()[1] == list(METHODS)
    with pytest.raises(SettingError, match="'rmse'"):
        fitted.backtest(waves(500), windows=1).plot("rmse")
