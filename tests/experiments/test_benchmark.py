"""The runner of the study: what a run stores, what is not run again, and which rows it may see."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer
from places import EXPERIMENTS
from toy_backbones import NormalisedToy

from dualweaver.adapters import DualWeaverAdapter

pytestmark = pytest.mark.usefixtures("one_thread")


CONTEXT, HORIZON, ROWS = 12, 4, 600


def table(test_value: float | None = None) -> pd.DataFrame:
    steps = np.arange(ROWS)[:, None] / 4 + np.arange(3)
    values = np.sin(steps) + np.random.default_rng(0).normal(0, 0.3, (ROWS, 3))
    if test_value is not None:
        values[int(0.8 * ROWS) :] = test_value
    return pd.DataFrame(values, columns=list("abc"), index=pd.date_range("2024", periods=ROWS, freq="h"))


@pytest.fixture
def rows_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """rows.py on a small table."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("rows")
    monkeypatch.setattr(module, "load_dataset", lambda name: table())
    return module


@pytest.fixture
def runner(rows_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmark.py on the same table with a toy backbone."""
    module = importlib.import_module("benchmark")
    monkeypatch.setattr(module, "load_backbone", lambda *args, **settings: NormalisedToy(CONTEXT, HORIZON))
    return module


def run(runner: ModuleType, store: Path, *change: str, **options: Any) -> pd.DataFrame:
    # Weather's split is 70, 10 and 20 per cent of whatever rows there are
    told = ["max_epochs=2", f"context_length={CONTEXT}", *change]
    runner.run("Weather", backbone="ttm", horizon=HORIZON, change=told, store=store, **options)
    return pd.read_csv(store)


def test_a_run_is_a_row_that_is_not_run_again(runner, tmp_path, monkeypatch):
    first = run(runner, tmp_path / "store.csv")
    assert len(first) == 1
    assert first["test_mse"].item() > 0
    assert len(first["channel_mse"].item().split()) == 3
    with monkeypatch.context() as patch:
        patch.setattr(runner, "fit", lambda *args: pytest.fail("fitted again"))
        pd.testing.assert_frame_equal(run(runner, tmp_path / "store.csv"), first)
    assert len(run(runner, tmp_path / "store.csv", seed=1)) == 2


def test_every_candidate_of_auto_is_a_row(runner, tmp_path):
    rows = run(runner, tmp_path / "store.csv", "adapter=auto")
    told = [json.loads(text) for text in rows["settings"]]
    assert [(row.get("adapter"), row.get("fine_tune")) for row in told] == [
        ("auto", None),
        (None, None),
        ("fine-tune", None),
        (None, True),
    ]
    assert rows["val_mse"][0] == rows["val_mse"][1:].min()


def test_candidates_beside_a_default_that_is_known_are_those_of_all(runner, tmp_path):
    whole = run(runner, tmp_path / "whole.csv", "adapter=auto")
    run(runner, tmp_path / "store.csv")
    later = run(runner, tmp_path / "store.csv", "adapter=auto", default_known=True)
    errors = ["settings", "val_mse", "test_mse", "forecaster", "fallback"]
    rows = [frame[errors].sort_values("settings", ignore_index=True) for frame in (whole, later)]
    pd.testing.assert_frame_equal(rows[0], rows[1])
    with pytest.raises(typer.BadParameter, match="no row of the default"):
        run(runner, tmp_path / "empty.csv", "adapter=auto", default_known=True)
    with pytest.raises(typer.BadParameter, match="adapter=auto"):
        run(runner, tmp_path / "store.csv", default_known=True)


def test_the_quick_check_fails_outside_of_what_the_seeds_of_the_store_gave(runner, tmp_path, monkeypatch):
    told = {**runner.QUICK, "data": "Weather", "horizon": HORIZON}
    monkeypatch.setattr(runner, "QUICK", told)
    monkeypatch.setattr(runner, "STORE", tmp_path / "store.csv")
    rows = pd.DataFrame([{**told, "seed": seed, "test_mse": error} for seed, error in enumerate((0.2, 0.3, 0.4))])
    rows.to_csv(tmp_path / "store.csv", index=False)
    margin = rows["test_mse"].std() / 3**0.5
    monkeypatch.setattr(runner, "fit", lambda *args: SimpleNamespace(pipeline=None))
    monkeypatch.setattr(runner.Rows, "to_score", lambda *args: None)
    context = SimpleNamespace(invoked_subcommand=None)
    for value, fails in ((0.19, False), (0.2 - 1.1 * margin, True), (0.4 + 0.9 * margin, False), (0.47, True)):
        monkeypatch.setattr(runner, "score", lambda *args, value=value: {"test_mse": value})
        with pytest.raises(typer.Exit) if fails else nullcontext():
            runner.main(context, quick=True, weights="")


def test_development_runs_do_not_see_the_test_rows(runner, rows_module, tmp_path, monkeypatch):
    expected = run(runner, tmp_path / "one.csv", develop=True)
    monkeypatch.setattr(rows_module, "load_dataset", lambda name: table(test_value=1e6))
    found = run(runner, tmp_path / "other.csv", develop=True)
    assert found["test_mse"].tolist() == expected["test_mse"].tolist()
    scored = run(runner, tmp_path / "other.csv")
    assert scored["test_zero_shot_mse"].iloc[1] != expected["test_zero_shot_mse"].item()


def test_the_ablation_of_shares_forecasts_with_the_whole_edit(runner):
    ablations = importlib.import_module("ablations")
    torch.manual_seed(0)
    x, backbone = torch.randn(2, CONTEXT, 3), NormalisedToy(CONTEXT, HORIZON)
    adapter = DualWeaverAdapter(3, range(3)).eval()
    edit = adapter.weaver.context_filter
    assert edit is not None
    torch.nn.init.normal_(edit.write.weight)
    share = adapter(backbone, x, HORIZON)
    edit.strength.fill_(1)
    whole = adapter(backbone, x, HORIZON)
    edit.strength.fill_(0.5)
    ablations.whole(adapter)
    assert not torch.allclose(share, whole)
    torch.testing.assert_close(adapter(backbone, x, HORIZON), whole)
    settings = {"context_length": CONTEXT, "max_epochs": 2}
    candidate = runner.fit(runner.Rows("Weather"), "ttm", HORIZON, settings, "whole").chosen
    assert not candidate.history["stage"].str.contains("share").any()
    assert candidate.error.mean() <= candidate.history["val_mse"].iloc[-1] * (
        1 + 1e-6
    )  # that of the last epoch, or zero-shot's


def test_tables_tell_gains_by_method_and_data_set(runner, tmp_path):
    figures = importlib.import_module("figures")
    run(runner, tmp_path / "store.csv")
    run(runner, tmp_path / "store.csv", seed=1)
    rows = figures.store(tmp_path / "store.csv")
    rows["horizon"], rows["settings"] = 96, "{}"
    shown = figures.by_set(rows, {"ours": "{}"}, "gain")
    expected = 100 * (1 - rows["test_mse"] / rows["test_zero_shot_mse"])
    assert shown["Weather"].tolist() == [f"{expected.mean():.2f} ± {expected.std():.2f}"]


def test_a_seed_draws_the_channels_that_noise_replaces_and_a_smaller_share_is_part_of_a_larger_one(rows_module):
    noisy_channels, rows = rows_module.noisy_channels, rows_module.Rows
    draws = [frozenset(noisy_channels(7, 0.5, seed).tolist()) for seed in range(6)]
    assert len(set(draws)) > 3
    assert all(set(noisy_channels(7, 0.25, seed).tolist()) < draw for seed, draw in enumerate(draws))
    untouched = rows("Weather").values
    first, other = (rows("Weather", seed, noise=0.5).values for seed in (0, 1))
    for seed, values in enumerate((first, other)):
        replaced = np.flatnonzero((values != untouched).any(axis=0)).tolist()
        assert set(replaced) == set(noisy_channels(3, 0.5, seed).tolist())
    assert (first != other).any()


def test_noise_and_nothing_are_compared_on_the_channels_that_every_run_has(runner, rows_module, tmp_path):
    figures = importlib.import_module("figures")
    run(runner, tmp_path / "store.csv")
    run(runner, tmp_path / "store.csv", drop=0.5)
    rows = figures.store(tmp_path / "store.csv")
    left = [len(text.split()) for text in rows["channel_mse"]]
    assert left == [3, 1]
    rows["settings"] = ["{}", '{"drop": 0.5}']
    (kept,) = set(range(3)) - set(rows_module.noisy_channels(3, 0.5, seed=0).tolist())
    whole, alone = (np.array(text.split(), float) for text in rows["channel_mse"])
    found = figures.noise(rows).iloc[0]
    assert found["in their place"] == "nothing"
    assert found["change of the error, %"] == pytest.approx(100 * (alone[0] / whole[kept] - 1))
    zero_shot = rows["test_zero_shot_mse"].iloc[1]
    assert found["gain over zero-shot, %"] == pytest.approx(100 * (1 - alone[0] / zero_shot), abs=0.02)


def test_a_noisy_run_is_compared_on_the_channels_that_stay_with_the_run_of_its_own_seed(rows_module, monkeypatch):
    figures, noisy_channels = importlib.import_module("figures"), rows_module.noisy_channels
    monkeypatch.setattr(figures, "WITHOUT_EXCHANGE", ["ETTh1", "ETTh2"])

    def row(data: str, seed: int, settings: str, errors: list[float]) -> dict[str, Any]:
        text = " ".join(map(str, errors))
        told = {"data": data, "seed": seed, "settings": settings, "horizon": 96}
        return told | {"channel_mse": text, "channel_gains": "0.2 " * len(errors)}

    rows = []
    for data, rises in (("ETTh1", [0.1, 0.3]), ("ETTh2", [-0.2, 0.0])):
        for seed, rise in enumerate(rises):
            noisy = [2.0] * 4
            for channel in noisy_channels(4, 0.5, seed):
                noisy[channel] = 50.0
            clean = [error / (1 + rise) for error in [2.0] * 4]
            rows += [row(data, seed, "{}", clean), row(data, seed, '{"noise": 0.5}', noisy)]
    rows.append(row("ETTh1", 0, '{"drop": 0.5}', [3.0, 3.0]))
    rows += [row("Exchange", 0, "{}", [2.0] * 4), row("Exchange", 0, '{"noise": 0.5}', [9.0] * 4)]
    found = figures.noise(pd.DataFrame(rows)).set_index(["data", "in their place"])
    change, error = found["change of the error, %"], found["standard error"]
    assert change["ETTh1", "noise"] == pytest.approx(20)
    assert change["ETTh2", "noise"] == pytest.approx(-10)
    assert error["ETTh1", "noise"] == pytest.approx(10)
    assert change["mean", "noise"] == pytest.approx(5)
    assert error["mean", "noise"] == pytest.approx(50**0.5)
    assert change["ETTh1", "nothing"] == pytest.approx(65)
    assert ("mean", "nothing") not in found.index
    assert found["gain over zero-shot, %"].to_numpy() == pytest.approx(20)
