"""The benchmark protocol: borders, early starts, scaling."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualweaver.data.splits import SPLIT_RULES, protocol_segments, split_borders
from dualweaver.errors import DataError, SettingError


def table(rows: int, channels: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(5.0, 3.0, (rows, channels))


def test_ett_is_cut_into_months_of_thirty_days_and_the_rest_is_left_out() -> None:
    hourly, quarterly = split_borders(17420, "ett-hour"), split_borders(69680, "ett-minute")
    assert hourly == (range(8640), range(8640, 11520), range(11520, 14400))
    assert quarterly == (range(34560), range(34560, 46080), range(46080, 57600))


@given(st.integers(20, 10**6), st.sampled_from(["ratio", "pems"]))
def test_proportional_splits_use_every_row_once_and_in_order(rows: int, rule: str) -> None:
    train, validation, test = split_borders(rows, rule)
    assert [*train[:1], *validation[:1], *test[:1], rows] == [0, train.stop, validation.stop, test.stop]
    assert len(train) + len(validation) + len(test) == rows


@given(st.integers(20, 10**6))
def test_the_shares_are_seventy_ten_twenty_or_sixty_twenty_twenty(rows: int) -> None:
    shares = [[len(part) for part in split_borders(rows, rule)] for rule in ("ratio", "pems")]
    for lengths, expected in zip(shares, ([0.7, 0.1, 0.2], [0.6, 0.2, 0.2]), strict=True):
        np.testing.assert_allclose(lengths, np.multiply(expected, rows), atol=2)


def test_validation_and_test_start_one_context_early_and_train_does_not_move() -> None:
    splits = split_borders(1000, "ratio").with_context(96)
    assert splits == (range(700), range(604, 800), range(704, 1000))


def test_segments_hold_the_rows_that_their_splits_name() -> None:
    values = table(1000)
    segments = protocol_segments(values, "ratio", 50, scale=False)
    for name in ("train", "validation", "test"):
        rows = getattr(segments.splits, name)
        np.testing.assert_array_equal(getattr(segments, name), values[rows.start : rows.stop])
    assert segments.scaler is None


def test_pems_parts_do_not_overlap_as_in_their_published_loader() -> None:
    segments = protocol_segments(table(100), "pems", 12)
    assert segments.splits == (range(60), range(60, 80), range(80, 100))


def test_only_the_train_rows_decide_the_scaling() -> None:
    values = table(1000)
    changed = values.copy()
    changed[700:] *= 100.0
    plain, disturbed = (protocol_segments(v, "ratio", 50) for v in (values, changed))
    np.testing.assert_array_equal(plain.train, disturbed.train)
    np.testing.assert_allclose(plain.train.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(plain.train.std(axis=0), 1.0, atol=1e-12)


def test_the_scaler_maps_segments_back_to_the_units_of_the_data() -> None:
    values = table(1000)
    segments = protocol_segments(values, "ratio", 50)
    assert segments.scaler is not None
    np.testing.assert_allclose(segments.scaler.inverse_transform(segments.test), values[750:], rtol=1e-12)


def test_a_channel_constant_in_training_gets_scale_one() -> None:
    values = table(1000)
    values[:700, 1] = 7.0
    values[700:, 1] = 9.0
    segments = protocol_segments(values, "ratio", 50)
    np.testing.assert_array_equal(segments.train[:, 1], 0.0)
    np.testing.assert_array_equal(segments.test[50:, 1], 2.0)


def test_missing_values_do_not_count_and_stay_missing() -> None:
    values = table(1000)
    values[::7, 0] = np.nan
    segments = protocol_segments(values, "ratio", 50)
    np.testing.assert_allclose(np.nanstd(segments.train, axis=0), 1.0, atol=1e-12)
    np.testing.assert_array_equal(np.isnan(segments.train), np.isnan(values[:700]))


def test_a_frame_and_its_values_give_the_same_segments_and_stay_as_they_were() -> None:
    values = table(200)
    frame = pd.DataFrame(values, columns=["a", "b"], index=pd.date_range("2020", periods=200, freq="h"))
    before = frame.copy()
    np.testing.assert_array_equal(
        protocol_segments(frame, "ratio", 10).test, protocol_segments(values, "ratio", 10).test
    )
    pd.testing.assert_frame_equal(frame, before)


@pytest.mark.parametrize(("rows", "rule"), [(14399, "ett-hour"), (57599, "ett-minute"), (3, "ratio"), (0, "pems")])
def test_too_few_rows_are_refused_with_the_rule_named(rows: int, rule: str) -> None:
    with pytest.raises(DataError, match=f"{rows} rows are too few for the split rule '{rule}'"):
        split_borders(rows, rule)


def test_an_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=", ".join(SPLIT_RULES)):
        split_borders(100, "thirds")


def test_a_context_longer_than_the_rows_before_validation_is_refused() -> None:
    with pytest.raises(SettingError, match=r"context_length must lie in 0 ... 70, not 71"):
        protocol_segments(table(100), "ratio", 71)


def test_a_table_that_is_not_two_dimensional_is_refused() -> None:
    with pytest.raises(DataError, match=r"\[time, channel\]"):
        protocol_segments(np.zeros(100), "ratio", 10)
