"""The benchmark of speed runs, and what it compares is the same; how fast anything is depends on the machine."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
from places import EXPERIMENTS


@pytest.mark.usefixtures("one_thread")
def test_every_claim_of_the_benchmark_is_measured_on_toy_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    speed, stopwatch = importlib.import_module("speed"), importlib.import_module("stopwatch")
    results = speed.run_trials(quick=True)  # raises where outputs that are compared differ
    assert len(results) >= 15
    for result in results:
        numbers = (result.ratio, result.ratio_cpu, result.seconds, result.against_seconds)
        assert all(math.isfinite(number) and number > 0 for number in numbers), result
    assert stopwatch.to_markdown(results, "# Speed").count("\n|") == len(results) + 2
    stopwatch.draw(results, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 0
