"""How much of a filter's edit validation lets forecasts apply."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_backbones import NormalisedToy

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Forecast
from dualweaver.data.windows import WindowDataset
from dualweaver.fit import selection
from dualweaver.fit.selection import choose_share, standard_error

CONTEXT, HORIZON, BLOCKS = 12, 4, 16
SIGN = torch.tensor([1.0, -1.0]).repeat(BLOCKS // 2)  # of what differs from block to block
VALUES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20)


@given(VALUES)
def test_the_standard_error_of_independent_values_is_the_textbook_one(values: list[float]) -> None:
    found = standard_error(torch.tensor(values, dtype=torch.float64), torch.arange(len(values)))
    assert found == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), rel=1e-9, abs=1e-9)


@given(VALUES, st.integers(2, 5))
def test_repeating_what_is_known_makes_nobody_surer(values: list[float], times: int) -> None:
    once = torch.tensor(values, dtype=torch.float64)
    blocks = 7 * torch.arange(len(values))
    repeated = standard_error(once.repeat(times), blocks.repeat(times))
    assert repeated == pytest.approx(standard_error(once, blocks), rel=1e-9, abs=1e-9)


def test_of_a_single_block_nothing_is_sure() -> None:
    assert standard_error(torch.randn(50), torch.zeros(50)) == math.inf


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    errors: dict[float, Any],
    weights: tuple[float, float] = (1.0, 1.0),
    blocks: int = BLOCKS,
    **settings: Any,
) -> float:
    """The share that is taken where forecasts are off by `errors`, a number a block (and target), or one for all."""
    adapter = DualWeaverAdapter(2, range(2))
    adapter.weights.copy_(torch.tensor(weights))
    edit = adapter.weaver.context_filter
    assert edit is not None
    table = torch.zeros(CONTEXT + (blocks + 1) * HORIZON, 2)
    windows = WindowDataset(table, range(blocks * HORIZON), CONTEXT + HORIZON)

    def forecasts(*arguments: Any, **options: Any) -> tuple[Forecast, torch.Tensor]:
        off = torch.as_tensor(errors[float(edit.strength)]).expand(2, blocks).T.repeat_interleave(HORIZON, dim=0)
        truth = torch.zeros(blocks * HORIZON, HORIZON, 2)
        return Forecast(truth + off.sqrt()[:, None]), truth

    monkeypatch.setattr(selection, "forecast_windows", forecasts)
    found = choose_share(adapter, NormalisedToy(), windows, CONTEXT, 0, tuple(errors), **settings)
    assert found == pytest.approx(
        {
            share: float((torch.as_tensor(off).expand(2, blocks) * adapter.weights[:, None]).mean())
            / float(adapter.weights.mean())
            for share, off in errors.items()
        }
    )
    return float(edit.strength)


def test_up_to_a_half_the_lower_error_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {0.25: 0.999, 0.5: 1.0, 1.0: 2.0}) == 0.25
    assert chosen(monkeypatch, {0.25: 1.0 + 0.5 * SIGN, 0.5: 0.999, 1.0: 2.0}) == 0.5


def test_more_than_a_half_is_taken_where_all_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {0.25: 1.2, 0.5: 1.0, 0.75: 0.9, 1.0: 0.8}) == 1.0
    assert chosen(monkeypatch, {0.25: 1.2, 0.5: 1.0, 0.75: 0.9, 1.0: 0.95}) == 0.75


def test_more_than_a_half_is_not_taken_for_a_gain_that_changes_from_block_to_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # with 16 blocks, 0.9 + 0.3 * SIGN is lower by 1.3 standard errors, and 2.6 if every window were one of its own
    assert chosen(monkeypatch, {0.25: 1.2, 0.5: 1.0, 1.0: 0.9 + 0.3 * SIGN}) == 0.5
    assert chosen(monkeypatch, {0.25: 1.2, 0.5: 1.0, 1.0: 0.9 + 0.15 * SIGN}) == 1.0  # 2.6


def test_the_lowest_error_of_all_does_not_hide_a_share_that_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {0.25: 1.2, 0.5: 1.0, 0.75: 0.95, 1.0: 0.9 + 0.3 * SIGN}) == 0.75


def test_within_a_single_block_a_larger_share_is_taken_only_where_the_choice_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {0.0: 1.5, 0.5: 1.0, 1.0: 0.1}
    assert chosen(monkeypatch, errors, blocks=1) == 0.5
    assert chosen(monkeypatch, errors, blocks=1, freely=1.0) == 1.0


def test_targets_count_by_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {0.25: torch.tensor([[1.0], [1.0]]), 0.5: torch.tensor([[0.9], [1.5]])}
    assert chosen(monkeypatch, errors, weights=(1.0, 1.0)) == 0.25
    assert chosen(monkeypatch, errors, weights=(1.0, 0.1)) == 0.5
