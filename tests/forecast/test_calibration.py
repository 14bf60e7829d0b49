"""Quantiles: nominal coverage on residuals that are exchangeable, order, interpolation, levels."""

from __future__ import annotations

import numpy as np
import pytest
from toys import waves, weaver

from dualweaver.errors import SettingError
from dualweaver.forecast.calibration import (
    LEVELS,
    Calibration,
    check_levels,
    check_percentages,
    edges_of,
    interpolate_levels,
)

STEPS, CHANNELS = 4, 200
DECILES = tuple(np.arange(1, 10) / 10)


def skewed(windows, seed):
    """Residuals whose tails differ, `[window, step, channel]`, wider at later steps."""
    random = np.random.default_rng(seed)
    return (random.gamma(2, size=(windows, STEPS, CHANNELS)) - 1) * np.arange(1, STEPS + 1)[:, None]


@pytest.mark.parametrize("windows", [19, 60, 400])
def test_coverage_is_nominal_for_a_point_forecast(windows):
    calibration = Calibration.fit(skewed(windows, 0), np.zeros((windows, STEPS, CHANNELS)), None, ())
    fresh = skewed(2000, 1)
    quantiles = calibration.apply(np.zeros((1, STEPS, CHANNELS)), None, (), LEVELS)[0]
    below = (fresh[..., None] <= quantiles).mean(axis=(0, 2))  # per step and level, over 200 calibrations
    for position, level in enumerate(LEVELS):
        reachable = np.clip(level, 1 / (windows + 1), windows / (windows + 1))  # of so few windows
        # four standard errors; and the rank is rounded outwards, by less than one window
        inwards = 2 / np.sqrt(windows * CHANNELS) + 0.003
        outwards = inwards + 1 / (windows + 1)
        low, high = (inwards, outwards) if level > 0.5 else (outwards, inwards)
        assert (below[:, position] > reachable - low).all(), level
        assert (below[:, position] < reachable + high).all(), level


@pytest.mark.parametrize("windows", [20, 25])
def test_coverage_of_few_windows_is_that_of_the_rank_and_never_less_than_promised(windows):
    random, channels = np.random.default_rng(0), 4000
    truth = random.uniform(size=(windows, 1, channels))  # so that coverage is the width itself
    calibration = Calibration.fit(truth, np.zeros_like(truth), None, ())
    for low, high in (edges_of(50), edges_of(80), edges_of(90)):
        edges = calibration.apply(np.zeros((1, 1, channels)), None, (), (low, high)).mean(axis=(0, 1, 2))
        ranks = np.floor((windows + 1) * low + 1e-9), np.ceil((windows + 1) * high - 1e-9)
        expected = np.clip(ranks, 1, windows) / (windows + 1)
        np.testing.assert_allclose(edges, expected, atol=0.006)


def test_wrong_quantiles_of_a_backbone_are_put_right():
    truth, fresh = skewed(400, 0), skewed(2000, 1)
    offered = np.broadcast_to(np.linspace(-0.1, 0.1, 9), (2000, STEPS, CHANNELS, 9))  # far too narrow
    calibration = Calibration.fit(truth, np.zeros_like(truth), offered[:400], DECILES)
    quantiles = calibration.apply(np.zeros((1, STEPS, CHANNELS)), offered[:1], DECILES, (0.1, 0.5, 0.9))[0]
    below = (fresh[..., None] <= quantiles).mean(axis=(0, 2))
    np.testing.assert_allclose(below, np.broadcast_to([0.1, 0.5, 0.9], (STEPS, 3)), atol=0.015)


def test_right_quantiles_of_a_backbone_are_kept():
    random = np.random.default_rng(0)
    truth = random.normal(size=(2000, STEPS, CHANNELS))
    offered = np.quantile(random.normal(size=10**6), DECILES)
    base = np.broadcast_to(offered, (2000, STEPS, CHANNELS, 9))
    calibration = Calibration.fit(truth, np.zeros_like(truth), base, DECILES)
    assert abs(calibration.offsets[..., LEVELS.index(0.1) : LEVELS.index(0.9) + 1]).mean() < 0.03


def test_quantiles_ascend_and_steps_beyond_the_calibrated_ones_use_the_last():
    random = np.random.default_rng(0)
    calibration = Calibration(random.normal(size=(2, 3, len(LEVELS))).astype(np.float32))
    quantiles = calibration.apply(random.normal(size=(5, 6, 3)), random.normal(size=(5, 6, 3, 9)), DECILES, LEVELS)
    assert (np.diff(quantiles, axis=-1) >= 0).all()
    flat = calibration.apply(np.zeros((1, 6, 3)), None, (), LEVELS)[0]
    np.testing.assert_array_equal(flat[2:], np.broadcast_to(flat[1], (4, 3, len(LEVELS))))


def test_levels_between_the_known_ones_are_interpolated_and_those_beyond_are_the_outermost():
    values = np.array([[0.0, 10.0, 30.0]])
    found = interpolate_levels(values, (0.1, 0.5, 0.9), (0.01, 0.1, 0.2, 0.5, 0.8, 0.9, 0.99))
    np.testing.assert_allclose(found, [[0, 0, 2.5, 10, 25, 30, 30]])


def test_the_levels_are_symmetric():
    np.testing.assert_allclose(LEVELS, 1 - np.array(LEVELS)[::-1])
    assert edges_of(80) == (0.1, 0.9)
    assert all(edge in LEVELS for width in (50, 60, 80, 90, 95, 98, 99) for edge in edges_of(width))


@pytest.mark.parametrize("levels", [[0], [1], [-0.1], [0.5, 1.1], [np.nan], ["a"], [None], [[0.1], [0.2, 0.3]]])
def test_levels_outside_of_the_unit_interval_are_refused(levels):
    with pytest.raises(SettingError, match=r"quantile.*\(0, 1\)"):
        check_levels(levels)


@pytest.mark.parametrize("widths", [[0], [100], [-5], [80, 120], ["wide"]])
def test_widths_outside_of_a_hundred_are_refused(widths):
    with pytest.raises(SettingError, match=r"level.*\(0, 100\)"):
        check_percentages(widths)


def test_levels_come_ascending_once_each_and_a_single_one_needs_no_list():
    assert check_levels([0.9, 0.1, 0.9]) == (0.1, 0.9)
    assert check_levels(0.5) == (0.5,)
    assert check_percentages([95, 80]) == (80, 95)
    assert check_levels([]) == ()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("adapter", ["dualweaver", "zero-shot"])
def test_the_intervals_of_a_fitted_forecaster_hold_on_rows_it_has_not_seen(adapter):
    df = waves(4000)
    model = weaver(adapter=adapter, max_epochs=1, validation_size=1000).fit(df.iloc[:3000])
    table = model.backtest(df, windows=100, step=9).table("coverage_80")
    assert table.loc["mean", "DualWeaver"] == pytest.approx(0.8, abs=0.03)
    assert table.loc["mean", "zero-shot"] == pytest.approx(0.8, abs=0.03)


def test_intervals_keep_their_coverage_when_the_data_get_wilder():
    random = np.random.default_rng(3)

    def residuals(windows: int, spread: np.ndarray) -> np.ndarray:
        return random.normal(size=(windows, STEPS, CHANNELS)) * spread[:, None, :]

    calm, wild = (np.full((400, CHANNELS), size) * random.uniform(0.5, 2, (400, CHANNELS)) for size in (1.0, 3.0))
    zero = np.zeros((400, STEPS, CHANNELS))
    calibration = Calibration.fit(residuals(400, calm), zero, None, (), calm)
    truth = residuals(400, wild)

    def covered(spread: np.ndarray | None) -> float:
        edges = calibration.apply(zero, None, (), (0.1, 0.9), spread)
        return float(((edges[..., 0] <= truth) & (truth <= edges[..., 1])).mean())

    assert covered(wild) == pytest.approx(0.8, abs=0.03)
    assert covered(None) < 0.6
