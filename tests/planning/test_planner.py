"""Plans: expressions for memory and time, all choices, and the fastest one within a budget."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from toys import waves

import dualweaver
from dualweaver import DualWeaver
from dualweaver.adapters import DualWeaverAdapter, make_adapter
from dualweaver.backbones import Backbone
from dualweaver.backbones.timer import TimerBackbone, TimerConfig, TimerForPrediction
from dualweaver.compute.limits import check_devices, parse_bytes, processes
from dualweaver.errors import SettingError
from dualweaver.planning import search
from dualweaver.planning.costs import Costs, Expression, probe_costs, rows_of
from dualweaver.planning.memory import record_memory, storage_bytes
from dualweaver.planning.plans import Plan, choose_plan, pareto, plans_for
from dualweaver.planning.search import plan, plan_training
from dualweaver.planning.step import Shape, TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, HORIZON = 64, 8


def timer(layers: int = 2) -> Backbone:
    torch.manual_seed(0)
    config = TimerConfig(
        input_token_len=8,
        output_token_lens=(8,),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return TimerBackbone(TimerForPrediction(config), context_length=CONTEXT)


def weaver(channels: int) -> DualWeaverAdapter:
    torch.manual_seed(1)
    return DualWeaverAdapter(channels, range(channels))


def measured_peak(step: TrainingStep) -> int:
    step()
    step.forget_gradients()
    constant = {
        "weights": storage_bytes([*step.backbone.parameters(), *step.backbone.buffers(), *step.adapter.parameters()]),
        "optimizer": storage_bytes(part for state in step.optimizer.state.values() for part in state.values()),
    }
    return record_memory(step, step.backbone, step.trained, constant, "cpu").peak


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE", 0.01)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return probe_costs(
        weaver,
        timer(3),
        HORIZON,
        precision="32",
        pieces=[(2, 32), (8, 32), (4, 64), (16, 64), (8, 128)],
        windows=[(1, 3, 32), (4, 3, 64), (2, 9, 64), (1, 20, 128), (8, 3, 128)],
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2e9), ("1.5 GiB", 1.5 * 2**30), ("800M", 8e8), ("64kb", 64e3), (8e9, 8e9), (123, 123), ("3e9", 3e9)],
)
def test_a_budget_is_read(text: Any, size: float) -> None:
    assert parse_bytes(text) == int(size)


@pytest.mark.parametrize("text", ["", "two GB", "-1GB", 0, True, "2PB", "1.2.3GB", "nan"])
def test_a_budget_that_cannot_be_read_is_refused(text: Any) -> None:
    with pytest.raises(SettingError, match=r"memory_budget=.*expected bytes, such as '2GB'"):
        parse_bytes(text)


def test_an_expression_is_found_from_its_values() -> None:
    terms = [(1.0, size, size * length) for size in (1, 4, 9) for length in (10.0, 50.0)]
    values = [7 + 3 * size + 0.5 * product for _, size, product in terms]
    found = Expression.fitted(terms, values)
    np.testing.assert_allclose(found.coefficients, (7, 3, 0.5), rtol=1e-8)
    assert found((1, 20, 2000)) == pytest.approx(7 + 60 + 1000)


def test_an_expression_never_falls_with_size() -> None:
    found = Expression.fitted([(1, 1), (1, 2), (1, 3)], [3, 2, 1])
    assert min(found.coefficients) >= 0


@pytest.mark.parametrize(
    ("context", "channels", "batch", "windows", "pairs"),
    [(64, 5, 8, 8, 10), (96, 3, 12, 6, 9), (128, 12, 2, 2, 4), (48, 30, 2, 1, 15), (112, 7, 4, 4, 28)],
)
def test_the_peak_of_shapes_that_were_not_probed_is_predicted_within_a_tenth(
    costs: Costs, context: int, channels: int, batch: int, windows: int, pairs: int
) -> None:
    adapter, shape = weaver(channels), Shape(channels, batch, context, HORIZON)
    expected = costs.bytes(adapter, shape, windows, pairs)
    adapter.pairs_at_once = pairs
    assert measured_peak(TrainingStep(adapter, timer(3), shape, micro_batch=windows)) == pytest.approx(
        expected, rel=0.1
    )


def test_time_grows_with_everything_that_makes_work(costs: Costs) -> None:
    adapter, shape = weaver(4), Shape(4, 8, 64, HORIZON)
    usual = costs.seconds(adapter, shape, 8, 8)
    assert costs.seconds(weaver(8), dataclasses.replace(shape, channels=8), 8, 8) > 1.3 * usual
    assert costs.seconds(adapter, dataclasses.replace(shape, batch_size=16), 16, 8) == pytest.approx(2 * usual, rel=0.3)
    last = len(costs.choices) - 1
    assert costs.seconds(adapter, shape, 8, 8, last) > usual
    assert costs.bytes(adapter, shape, 8, 8, last) < costs.bytes(adapter, shape, 8, 8)


@pytest.mark.parametrize("share", [0.35, 0.6, 1.0])
def test_a_plan_stays_inside_its_budget_and_keeps_the_batch(share: float) -> None:
    backbone, adapter, shape = timer(), weaver(6), Shape(6, 12, CONTEXT, HORIZON)
    weights = storage_bytes([*backbone.parameters(), *adapter.parameters()])
    adapter.pairs_at_once = 72
    whole = measured_peak(TrainingStep(weaver_like(adapter), backbone, shape))
    budget = weights + share * (whole - weights) + 0.1 * weights
    chosen = plan_training([backbone], weaver(6), shape, budget).chosen
    assert chosen.micro_batch * chosen.accumulate == 12
    fresh = weaver(6)
    with chosen.applied(fresh, backbone):
        assert measured_peak(TrainingStep(fresh, backbone, shape, micro_batch=chosen.micro_batch)) <= budget
    assert fresh.pairs_at_once is None


def weaver_like(adapter: DualWeaverAdapter) -> DualWeaverAdapter:
    fresh = weaver(adapter.channels)
    fresh.pairs_at_once = adapter.pairs_at_once
    return fresh


def test_less_memory_is_never_faster(costs: Costs) -> None:
    adapter, shape = weaver(6), Shape(6, 12, CONTEXT, HORIZON)
    plans = plans_for(costs, adapter, shape)
    assert {one.micro_batch for one in plans} == {1, 2, 3, 4, 6, 12}
    assert {one.rows for one in plans} >= {1, 72}
    assert any(one.recompute for one in plans)
    best = pareto(plans)
    for budget in np.linspace(best[0].bytes, best[-1].bytes, 7):
        chosen = choose_plan(plans, budget, [costs], adapter, shape, margin=0.0)
        assert chosen.bytes <= budget
        assert chosen.seconds == min(one.seconds for one in plans if one.bytes <= budget)


def made_plan(size: float, seconds: float) -> Plan:
    return Plan(1, 1, 1, 1, (), "32", 1, size, seconds)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=30))
def test_the_frontier_holds_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    best = [(one.bytes, one.seconds) for one in pareto([made_plan(size, seconds) for size, seconds in pairs])]
    beaten = {
        one for one in pairs if any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in pairs)
    }
    assert set(best) == set(pairs) - beaten
    assert best == sorted(best)
    assert len(best) == len(set(best))


def test_where_nothing_fits_it_is_said_what_it_would_take() -> None:
    with pytest.raises(SettingError) as caught:
        plan(timer(1), memory_budget="100kB", channels=4, batch_size=4, horizon=8, context_length=CONTEXT)
    message = str(caught.value)
    assert message.startswith("memory_budget of 0.1 MB: training takes at least ")
    assert "MB of it weights" in message
    assert "shorter context_length, fewer columns, or precision='bf16'" in message
    needed = float(message.partition("at least ")[2].partition(" MB")[0])
    found = plan(timer(1), memory_budget=1.1e6 * needed, channels=4, batch_size=4, horizon=8, context_length=CONTEXT)
    assert found.chosen.bytes <= 1.1e6 * needed


def test_several_devices_share_a_batch_and_less_is_left_for_each(costs: Costs) -> None:
    adapter, shape = weaver(6), Shape(6, 12, CONTEXT, HORIZON)
    plans = plans_for(costs, adapter, shape, devices=4, link=1e12)
    assert {one.devices for one in plans} == {1, 2, 4}
    assert all(one.micro_batch * one.accumulate * one.devices == 12 for one in plans)
    fastest = {width: min(one.seconds for one in plans if one.devices == width) for width in (1, 2, 4)}
    assert fastest[4] < fastest[2] < fastest[1]
    slow = plans_for(costs, adapter, shape, devices=4, link=1e3)
    assert min(slow, key=lambda one: one.seconds).devices == 1  # the wire eats what is gained


def test_precision_is_chosen_only_where_it_is_left_to_the_plan() -> None:
    sizes: dict[str, Any] = {"channels": 3, "batch_size": 4, "horizon": 8, "context_length": CONTEXT}
    assert {one.precision for one in plan(timer(1), memory_budget="1GB", **sizes).frontier} == {"32"}
    found = plan(timer(1), memory_budget="1GB", precision="auto", **sizes)
    assert found.frontier[0].precision == "bf16"  # the least memory


@pytest.mark.parametrize("name", ["adapts", "fine-tune"])
def test_other_adapters_can_be_planned(name: str) -> None:
    found = plan(
        timer(1), adapter=name, memory_budget="1GB", channels=3, batch_size=4, horizon=8, context_length=CONTEXT
    )
    adapter = make_adapter(name, 3, range(3))
    assert all(one.rows == rows_of(adapter, one.micro_batch) for one in found.frontier)


def test_a_plan_survives_json() -> None:
    one = dataclasses.replace(made_plan(5, 2.5), recompute=("model.layers.0.feed",))
    assert Plan.from_dict(json.loads(json.dumps(dataclasses.asdict(one)))) == one


# Through the estimator


def fitted(folder: Path | None = None, **settings: Any) -> tuple[DualWeaver, pd.DataFrame]:
    frame = waves(260, "abc")
    common: dict[str, Any] = {"context_length": CONTEXT, "max_epochs": 1, "batch_size": 16, "window_stride": 4}
    model = DualWeaver(timer(1), HORIZON, verbose=False, **(common | settings)).fit(frame, resume=folder)
    return model, model.predict()


def test_a_fit_within_a_budget_forecasts_what_one_without_does() -> None:
    plain, expected = fitted()
    assert plain.plan_ is None
    model, forecast = fitted(memory_budget="1GB")
    assert model.plan_ is not None
    assert model.plan_.micro_batch * model.plan_.accumulate == 16
    assert model.pipeline_.adapter.series_at_once == model.plan_.series
    if model.plan_.micro_batch == 16:  # else dropout is drawn per micro-batch
        np.testing.assert_allclose(forecast, expected, rtol=1e-4)
    tight, _ = fitted(memory_budget="1.5MB")
    assert tight.plan_ is not None
    assert tight.plan_.bytes < 1.5e6  # which of those that fit is fastest depends on the machine's load
    np.testing.assert_allclose(tight.scores_["mse"], plain.scores_["mse"], rtol=0.2)  # dropout is drawn otherwise
    assert tight.plan_.micro_batch * tight.plan_.accumulate == 16


def test_a_fit_that_goes_on_keeps_its_plan_and_its_bits(tmp_path: Path) -> None:
    first, forecast = fitted(tmp_path / "kept", memory_budget="2MB")
    file = tmp_path / "kept" / "dualweaver.plan.json"
    kept = json.loads(file.read_text())
    assert first.plan_ is not None
    assert kept["rows"] == first.plan_.rows
    file.write_text(json.dumps({**kept, "seconds": 123.0}))
    again, same = fitted(tmp_path / "kept", memory_budget="2MB")
    assert again.plan_ is not None
    assert again.plan_.seconds == 123.0  # it was read, not made again
    pd.testing.assert_frame_equal(forecast, same, check_exact=True)


def test_forecasts_are_the_same_however_few_series_go_through_at_once(tmp_path: Path) -> None:
    model, forecast = fitted(memory_budget="1GB", quantiles=[0.1, 0.9])
    for series in (1, 4):
        model.pipeline_.adapter.series_at_once = series
        pd.testing.assert_frame_equal(model.predict(), forecast, rtol=1e-5)
    model.save(tmp_path / "kept")
    pd.testing.assert_frame_equal(DualWeaver.load(tmp_path / "kept", backbone=timer(1)).predict(), forecast, rtol=1e-5)


def test_without_a_budget_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualweaver.fit.fitting.plan_stages", lambda *_: pytest.fail("planned"))
    model, _ = fitted()
    assert model.pipeline_.adapter.pairs_at_once is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_budget": "much"}, "memory_budget='much': expected bytes"),
        ({"memory_budget": "10kB"}, "training takes at least"),
        ({"devices": 0}, "devices=0: expected a whole number"),
        ({"devices": 3}, "devices=3: expected a divisor of batch_size=16"),
        ({"devices": 2}, "devices=2, but 1 processes run this script: start it with `torchrun --nproc-per-node 2"),
    ],
)
def test_what_cannot_be_done_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fitted(**settings)


def test_processes_on_several_machines_are_told_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_devices(8, 32)
    assert processes(8) == {"devices": 4, "nodes": 2, "strategy": "ddp"}
    assert processes(1) == {}


def test_the_command_line_plans(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backbone", "fracast", "--context-length", 32, "--channels", 2, "--batch-size", 4, "--horizon", 8]
    assert run("plan", "--memory-budget", "200MB", *options) == 0
    assert "chosen" in capsys.readouterr().out
    assert run("plan", "--memory-budget", "10kB", *options) == 2
    assert "training takes at least" in capsys.readouterr().err


def test_it_is_reached_from_the_package() -> None:
    assert dualweaver.plan is plan
    Console(file=open("/dev/null", "w")).print(  # noqa: SIM115
        plan(timer(1), memory_budget="1GB", channels=2, batch_size=2, horizon=8, context_length=CONTEXT)
    )
