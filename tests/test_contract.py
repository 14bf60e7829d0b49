"""What users are promised for each input situation, numbered as in the contract.

Memory, processes and Ctrl-C (17, 20, 28, 29) are in `test_contract_processes.py`, refusals (27, 30) in
`test_contract_refusals.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from toys import CONTEXT, HORIZON, Repeats, Toy, refusal, waves, weaver

import dualweaver.forecast.pipeline
from dualweaver import load_backbone
from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone, Forecast
from dualweaver.data.module import WindowDataModule
from dualweaver.data.windows import WindowDataset, window_starts
from dualweaver.fit.module import AdaptationModule, TrainingSettings
from dualweaver.method import FILTER_SHARES

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS = ["dualweaver", "adapts", "fine-tune", "zero-shot"]


@pytest.mark.parametrize("rows_after_change", [200, 4, -3])
def test_01_future_stamps_are_one_hour_apart_across_the_october_change(rows_after_change):
    change = pd.Timestamp("2024-10-27 01:00", tz="UTC")
    index = pd.date_range(end=change + pd.Timedelta(hours=rows_after_change), periods=500, freq="h")
    df = waves(500).set_index(index.tz_convert("Europe/Amsterdam"))
    df.index.freq = None
    forecast = weaver().fit(df).predict()
    assert isinstance(forecast.index, pd.DatetimeIndex)
    assert str(forecast.index.tz) == "Europe/Amsterdam"
    stamps = pd.DatetimeIndex([df.index[-1], *forecast.index]).tz_convert("UTC")
    assert (np.diff(stamps) == np.timedelta64(1, "h")).all()


def test_02_a_stamp_that_comes_twice_is_named_with_its_count():
    df = waves()
    twice = pd.concat([df.iloc[:100], df.iloc[[99]] + 1, df.iloc[100:]])
    message = refusal(weaver().fit, twice)
    assert str(df.index[99]) in message
    assert "2 times" in message


def test_03_business_days_are_recognised_and_no_weekend_appears():
    df = waves(freq="B")
    df.index.freq = None
    forecast = weaver().fit(df).predict()
    assert forecast.index.equals(pd.date_range(df.index[-1], periods=HORIZON + 1, freq="B")[1:])


def test_04_hours_of_the_day_only_are_refused_with_advice_or_regularised_and_said():
    df = waves(800)
    day = df[(df.index.hour >= 8) & (df.index.hour <= 18)]
    message = refusal(weaver().fit, day)
    assert "gaps" in message
    assert "freq=" in message
    with pytest.warns(UserWarning, match="had no row: inserted"):
        forecast = weaver(freq="h").fit(day).predict()
    assert forecast.index[0] == day.index[-1] + pd.Timedelta(hours=1)


def test_05_scattered_gaps_keep_the_common_grid_and_can_be_refused():
    df = waves()
    random = np.random.default_rng(1)
    for column in df:
        df.loc[df.index[random.choice(399, 20, replace=False)], column] = np.nan
    model = weaver().fit(df)
    forecast = model.predict(quantiles=[0.1, 0.9])
    assert np.isfinite(forecast.to_numpy()).all()
    assert forecast.index[0] == df.index[-1] + pd.Timedelta(hours=1)
    assert len(model.tails_[0].index) == CONTEXT
    assert "'a' (20)" in refusal(weaver(missing="raise").fit, df)


def test_06_a_column_without_any_value_is_named_before_the_model_is_called():
    toy = Toy()
    assert "'b'" in refusal(weaver(toy).fit, waves().assign(b=np.nan))
    assert toy.series == 0


def test_07_a_column_that_starts_late_leaves_the_others_as_they_are():
    df = waves(1000)
    late = df.copy()
    late.loc[late.index[:300], "b"] = np.nan
    plain = weaver(adapter="zero-shot")
    pd.testing.assert_frame_equal(plain.fit(late).predict()[["a", "c"]], plain.fit(df).predict()[["a", "c"]])
    assert np.isfinite(weaver().fit(late).predict().to_numpy()).all()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_08_a_constant_column_stays_what_it_is(adapter):
    forecast = weaver(adapter=adapter).fit(waves().assign(b=7.0)).predict(quantiles=[0.1, 0.9])
    assert np.isfinite(forecast.to_numpy()).all()
    np.testing.assert_allclose(forecast["b"], 7, atol=0.1)


@pytest.mark.parametrize(("before", "after"), [(7.0, 9.0), (0.0, 9.0), (7e9, 9e9), (-1e-6, 1.0), (0.0, 1e12)])
@pytest.mark.parametrize("fusion", ["mlp", "cnn"])
def test_09_a_column_that_was_constant_and_steps_blows_nothing_up(fusion, before, after):
    model = weaver(fusion=fusion, max_epochs=1).fit(waves().assign(b=before))
    model.pipeline_.fallback[:] = False
    torch.manual_seed(0)
    for layer in model.pipeline_.adapter.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.3)  # as if the fusion made much of a column that never moved
    context = waves(seed=5).assign(b=before)
    calm = model.predict(context)
    context.iloc[-10:, 1] = after
    forecast = model.predict(context)
    assert (forecast[["a", "c"]] - calm[["a", "c"]]).abs().to_numpy().max() < 1  # their range is 8
    assert (forecast["b"] - after).abs().max() < 2 * abs(after - before)


def test_10_columns_are_matched_by_name():
    df = waves()
    model = weaver().fit(df)
    expected = model.predict(df)
    pd.testing.assert_frame_equal(model.predict(df[["c", "a", "b"]]), expected)
    assert "'b'" in refusal(model.predict, df.drop(columns="b"))
    with pytest.warns(UserWarning, match="'extra'.*ignored"):
        pd.testing.assert_frame_equal(model.predict(df.assign(extra=1.0)), expected)


def test_11_numbers_in_any_dress_are_cast_and_what_is_none_is_named():
    df = waves(columns="abcde")
    whole, flag, text = df["b"].round().astype(int), df["c"] > 10, df["d"].round(3).astype(str)
    dressed = df.assign(b=whole, c=flag, d=text, e=df["e"].round().astype("category"))
    plain = df.assign(b=whole.astype(float), c=flag.astype(float), d=text.astype(float), e=df["e"].round())
    pd.testing.assert_frame_equal(weaver().fit(dressed).predict(), weaver().fit(plain).predict())
    message = refusal(weaver().fit, dressed.assign(d=["12.5", "north"] * 200))
    assert "'d'" in message
    assert "'north'" in message


def test_12_too_few_rows_get_a_shorter_context_where_the_backbone_can():
    df = waves(90, "ab")
    with pytest.warns(UserWarning, match="context of .* instead of 512"):
        model = weaver("fracast", context_length=512, adapter="zero-shot").fit(df)
    assert 8 <= model.context_length_ < 90
    assert np.isfinite(model.predict().to_numpy()).all()
    with pytest.warns(UserWarning, match="20 rows: its forecast sees these only"):
        assert np.isfinite(model.predict(df.iloc[-20:]).to_numpy()).all()


@pytest.mark.parametrize("adapter", ["dualweaver", "zero-shot"])
def test_12_else_the_message_states_the_fewest_rows_that_do(adapter):
    message = refusal(weaver(adapter=adapter).fit, waves(30))
    enough = int(message.split("at least ")[1].split()[0])
    assert str(enough - 1) in refusal(weaver(adapter=adapter).fit, waves(enough - 1))
    model = weaver(adapter=adapter).fit(waves(enough))
    assert model.predict().shape == (HORIZON, 3)
    assert "31 rows" in refusal(model.predict, waves(31))
    assert "at least 32" in refusal(model.predict, waves(31))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_13_a_horizon_beyond_the_native_one_is_rolled_forward_with_one_notice(adapter):
    with pytest.warns(UserWarning, match="native horizon of 8 ") as caught:
        forecast = weaver(adapter=adapter, horizon=20).fit(waves()).predict()
    assert len(caught) == 1
    assert forecast.shape == (20, 3)
    model = weaver(adapter=adapter).fit(waves())
    with pytest.warns(UserWarning, match="native horizon of 8 ") as caught:
        longer = model.predict(horizon=21)
    assert len(caught) == 1
    assert longer.shape == (21, 3)
    pd.testing.assert_frame_equal(longer.iloc[:HORIZON], model.predict(), check_freq=False)


def test_14_two_rows_are_refused_for_their_number_also_where_freq_is_given():
    model = weaver(freq="h").fit(waves())
    message = refusal(model.predict, waves().iloc[:2])
    assert "2 rows" in message
    assert "freq" not in message


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_15_channels_of_any_scale_are_each_forecast_as_well_as_alone(adapter):
    df = waves(columns="abcd")
    sizes = np.array([1e-9, 1.0, 1e5, 1e12])
    model, plain = weaver(adapter=adapter).fit(df * sizes), weaver(adapter=adapter).fit(df)
    forecast, expected = model.predict(quantiles=[0.1, 0.9]), plain.predict(quantiles=[0.1, 0.9])
    np.testing.assert_allclose(forecast / np.repeat(sizes, 3), expected, rtol=1e-3)
    np.testing.assert_allclose(model.scores_["mse"], plain.scores_["mse"], rtol=1e-3)
    for column, size in zip(df, sizes, strict=True):
        alone = weaver(adapter="zero-shot").fit(df[[column]] * size)
        np.testing.assert_allclose(
            model.scores_.loc[column, "zero_shot_mse"], alone.scores_["zero_shot_mse"], rtol=1e-4
        )


def test_16_past_covariates_cost_no_backbone_pass():
    toy = Toy()
    model = weaver(toy, targets=["d"], max_epochs=1, window_stride=1, batch_size=64).fit(waves(columns="abcdefg"))
    training = len(range(CONTEXT + HORIZON, 320 + 1))
    validation = len(range(HORIZON, 80 + 1))
    # scored before, after each epoch, at every strength of the filter and once more for the fall-back, with 2 series;
    # and by zero-shot, with 1
    assert toy.series == 2 * training + ((3 + len(FILTER_SHARES)) * 2 + 1) * validation
    model.pipeline_.fallback[:] = False
    toy.series = 0
    assert model.predict().columns.tolist() == ["d"]
    assert toy.series == 2


@pytest.mark.parametrize("adapter", ["dualweaver", "zero-shot"])
def test_18_metrics_of_158_windows_do_not_depend_on_the_batch(adapter, monkeypatch):
    df = waves(600)
    model = weaver(adapter=adapter).fit(df.iloc[:400])
    model.pipeline_.fallback[:] = False
    per_window = 6 if adapter == "dualweaver" else 3
    reports = []
    for batch in (1, 32, 158):
        monkeypatch.setattr(dualweaver.forecast.pipeline, "SERIES_AT_ONCE", batch * per_window)
        reports.append(model.backtest(df, windows=158, step=1))
    assert reports[0].forecasts["cutoff"].nunique() == 158
    assert len(reports[0].forecasts) == 158 * HORIZON * 3
    for other in reports[1:]:
        pd.testing.assert_frame_equal(other.scores, reports[0].scores, rtol=1e-5)


class Sampler(Backbone):
    """Draws its quantiles, shared by all series of a call, like the backbones that sample."""

    name = "sampler"

    def native(self, context: torch.Tensor) -> torch.Tensor:
        return context[:, -HORIZON:]

    def distribution(
        self, context: torch.Tensor, horizon: int | None = None, *, generator: torch.Generator | None = None
    ) -> Forecast:
        draws = torch.randn(3, generator=generator).sort().values
        mean = self(context, horizon)
        return Forecast(mean + draws[1], mean[..., None] + draws, (0.1, 0.5, 0.9))

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None, **kwargs: Any) -> Backbone:
        raise NotImplementedError


def test_18_nor_do_forecasts_that_are_sampled(monkeypatch):
    backbone = Sampler(context_length=CONTEXT, native_horizon=HORIZON)
    backbone.weight = nn.Parameter(torch.zeros(1))
    model = weaver(backbone, adapter="zero-shot").fit(waves())
    reports = []
    for batch in (1, 6, 99):
        monkeypatch.setattr(dualweaver.forecast.pipeline, "SERIES_AT_ONCE", batch)
        reports.append(model.backtest(waves(500), windows=20, step=1))
    for other in reports[1:]:
        pd.testing.assert_frame_equal(other.forecasts, reports[0].forecasts, rtol=1e-6)


def test_18_the_validation_error_of_training_does_not_depend_on_the_batch():
    values = torch.from_numpy(waves(158 + CONTEXT + HORIZON - 1).to_numpy(np.float32).copy())
    windows = WindowDataset(values, window_starts([len(values)], CONTEXT + HORIZON), CONTEXT + HORIZON)
    assert len(windows) == 158
    backbone = load_backbone(Toy(), context_length=CONTEXT)
    errors = []
    for batch in (1, 32, 158):
        data = WindowDataModule(windows, windows, validation_batch_size=batch)
        module = AdaptationModule(
            DualWeaverAdapter(3, [0, 1, 2]),
            backbone,
            TrainingSettings(),
            context_length=CONTEXT,
            horizon=HORIZON,
            windows=158,
        ).eval()
        with torch.no_grad():
            for number, window in enumerate(data.val_dataloader()):
                module.validation_step(window, number)
        errors.append(float(module.val_mse.compute().mean()))
    np.testing.assert_allclose(errors, errors[0], rtol=1e-5)


@pytest.mark.parametrize("adapter", ["dualweaver", "adapts", "fine-tune"])
def test_19_the_same_seed_gives_the_same_bits_and_another_one_others(adapter):
    df = waves()
    first, again, other = (weaver(adapter=adapter, seed=seed).fit(df) for seed in (1, 1, 2))
    for model in (first, again, other):
        model.pipeline_.fallback[:] = False
        torch.rand(3)  # what the caller draws in between must not matter
    pd.testing.assert_frame_equal(first.predict(level=[80]), again.predict(level=[80]), check_exact=True)
    pd.testing.assert_frame_equal(first.history_, again.history_, check_exact=True)
    assert not first.predict().equals(other.predict())


def test_21_predict_continues_the_frame_that_it_is_given():
    df = waves(500)
    model = weaver().fit(df.iloc[:400])
    new = df.iloc[440:480]
    forecast = model.predict(new)
    assert forecast.index[0] == new.index[-1] + pd.Timedelta(hours=1)
    pd.testing.assert_frame_equal(forecast, model.predict(df.iloc[:480]))
    assert not np.allclose(forecast, model.predict())


def test_22_infinities_are_missing_values_and_said_to_be():
    df = waves()
    gaps, infinite = df.copy(), df.copy()
    gaps.iloc[[50, 390], 1] = np.nan
    infinite.iloc[[50, 390], 1] = np.inf, -np.inf
    with pytest.warns(UserWarning, match="infinite values in 'b'"):
        model = weaver().fit(infinite)
    pd.testing.assert_frame_equal(model.predict(), weaver().fit(gaps).predict())
    assert "infinite values in 'b' (2)" in refusal(weaver(missing="raise").fit, infinite)


def test_23_unsorted_stamps_are_sorted_with_a_notice():
    df = waves()
    model = weaver().fit(df)
    with pytest.warns(UserWarning, match="sorted by time"):
        shuffled = weaver().fit(df.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(shuffled.predict(), model.predict())


@pytest.mark.parametrize(
    "index",
    [
        pd.RangeIndex(400),
        pd.RangeIndex(10, 810, 2, name="row"),
        pd.period_range("2020-01", periods=400, freq="M", name="month"),
    ],
    ids=lambda index: str(index.dtype),
)
def test_24_the_future_index_is_of_the_same_kind(index):
    forecast = weaver().fit(waves().set_index(index)).predict()
    assert type(forecast.index) is type(index)
    assert forecast.index.dtype == index.dtype
    assert forecast.index.name == index.name
    assert forecast.index[0] == index[-1] + (index[1] - index[0])


def test_25_where_adapting_does_not_pay_zero_shot_forecasts_and_that_is_said(capsys):
    spikes = np.where(np.arange(400) % HORIZON == 0, 5.0, 0.0)
    df = waves(columns=["up", "down"]).assign(up=spikes, down=-spikes)
    # flipping makes the backbone wrong on one and mends half of the error on the other
    model = weaver(Repeats(HORIZON), learning_rate=1e-9, max_epochs=1, verbose=True).fit(df)
    assert model.scores_["forecaster"].to_dict() == {"up": "zero-shot", "down": "dualweaver"}
    assert model.scores_["gain"].to_dict() == {"up": 0, "down": pytest.approx(0.75, abs=0.01)}
    assert "zero-shot forecasts: up" in capsys.readouterr().err.replace("\n", " ")
    np.testing.assert_allclose(model.predict()["up"], spikes[:HORIZON], atol=1e-5)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_26_one_channel_alone_is_forecast(adapter):
    forecast = weaver(adapter=adapter).fit(waves(columns="a")).predict()
    assert forecast.columns.tolist() == ["a"]
    assert forecast["a"].between(0, 20).all()
