"""How many windows a fit looks at."""

from __future__ import annotations

import pytest
from toy_backbones import NormalisedToy

from dualweaver.fit import effort
from dualweaver.fit.effort import LEAST, MOST, USUAL, epoch_windows, validation_windows


def windows(series: int = 2, available: int | None = None) -> int:
    return epoch_windows(NormalisedToy(12, 4), 12, 4, series, available)


def test_long_tables_show_more_windows_an_epoch_up_to_a_limit():
    assert [windows(available=count) for count in (100, 8 * USUAL, 12 * USUAL, 10**6)] == [USUAL, USUAL, 1536, MOST]


def test_a_costly_step_shows_fewer_windows_in_proportion(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(effort, "forward_cost", lambda *sizes: effort.EPOCH_BUDGET["cpu"] / 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [windows(series, 10**6) for series in (1, 2, 100)] == [1000, 500, LEAST]


def test_validation_grows_with_an_epoch_within_limits():
    assert [validation_windows(count) for count in (10, 600, 10**4)] == [128, 300, 512]
