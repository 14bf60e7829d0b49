"""The measurements of memory and time within a budget run; how they come out depends on the machine."""

from __future__ import annotations

import importlib
import math

import pytest
from places import EXPERIMENTS

from dualweaver.planning import search


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["profiles", "recomputation", "predictions", "plans", "wide"])
def test_every_trial_gives_its_rows_on_toy_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.setattr(search, "PATIENCE", 0.01)
    scaling = importlib.import_module("scaling")
    rows = scaling.TRIALS[name](True)
    assert rows
    assert not any(math.isnan(row.measured) for row in rows)
    certain = ("equal bits", "peak against the budget", "forecasts of the same weights")
    for row in rows:
        assert row.holds or not any(claim in row.claim for claim in certain), row
    assert scaling.to_markdown(rows, "# Title").count("\n|") == len(rows) + 2
