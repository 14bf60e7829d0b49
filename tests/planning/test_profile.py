"""Where time and memory of training go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import run
from rich.console import Console
from small_backbones import FACTORIES

import dualweaver
from dualweaver.backbones import Backbone
from dualweaver.compute.recompute import part_names
from dualweaver.errors import SettingError
from dualweaver.planning.memory import record_memory, storage_bytes
from dualweaver.planning.parts import take_inventory
from dualweaver.planning.profiling import Profile, profile
from dualweaver.planning.step import PHASES, Stopwatch

pytestmark = pytest.mark.usefixtures("one_thread")

MEGABYTE = 2**20


def frozen(name: str) -> Backbone:
    torch.manual_seed(0)
    return FACTORIES[name]().freeze()


def profiled(name: str, **settings: object) -> Profile:
    backbone = frozen(name)
    common = {"channels": 2, "batch_size": 4, "horizon": 8, "context_length": backbone.context_length, "steps": 2}
    return profile(backbone, **{**common, **settings})  # type: ignore[arg-type]


def test_memory_over_time_is_that_of_what_was_allocated() -> None:
    model = torch.nn.Linear(1, 1)

    def allocate() -> None:
        first = torch.empty(3 * MEGABYTE, dtype=torch.uint8)
        second = torch.empty(2 * MEGABYTE, dtype=torch.uint8)
        del first
        torch.empty(MEGABYTE, dtype=torch.uint8).add_(1)
        del second

    found = record_memory(allocate, model, (), {"weights": 7 * MEGABYTE}, "cpu")
    assert found.peak == pytest.approx(12 * MEGABYTE, rel=1e-3)
    assert found.totals[0] == found.totals[-1] == 7 * MEGABYTE
    assert found.at_peak()["weights"] == 7 * MEGABYTE
    assert found.seconds == sorted(found.seconds)


def test_gradients_and_what_is_kept_for_them_are_told_apart() -> None:
    weight = torch.nn.Parameter(torch.ones(MEGABYTE // 4))

    def train() -> None:
        (weight.exp() * 2).sum().backward()

    found = record_memory(train, torch.nn.Identity(), [weight], {}, "cpu")
    kept, gradients = (max(found.held[name]) for name in ("outside of blocks", "weight gradients"))
    assert kept == pytest.approx(MEGABYTE, rel=0.01)  # exp keeps its result
    assert gradients == MEGABYTE
    assert found.held["weight gradients"][-1] == MEGABYTE  # they stay
    assert found.held["outside of blocks"][-1] == found.held["workspace"][-1] == 0


@pytest.mark.parametrize("name", ["timer", "sundial", "ttm", "fracast", "module"])
@pytest.mark.parametrize("objective", ["reconstruction", "paper"])
def test_a_profile_tells_all_phases_and_holders(name: str, objective: str) -> None:
    backbone = frozen(name)
    found = profiled(name, objective=objective)
    assert tuple(found.seconds) == PHASES
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert found.windows_per_second * found.step_seconds == pytest.approx(4)
    assert 0 < found.share < 1
    at_peak = found.holdings.at_peak()
    assert sum(at_peak.values()) == found.holdings.peak
    assert at_peak["weights"] >= storage_bytes(backbone.parameters())
    assert at_peak["optimizer state"] > 0
    assert at_peak["data"] > 0
    held = set(found.holdings.held) - {"weights", "optimizer state", "data", "workspace", "weight gradients"}
    assert len(held) >= (1 if name == "module" and objective == "paper" else 2)
    assert max(found.holdings.held["weight gradients"]) > 0


def test_blocks_hold_what_the_inventory_counts() -> None:
    backbone = frozen("timer")
    x = torch.randn(8, backbone.context_length, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return backbone(x, 8).square().sum()

    inventory = take_inventory(backbone, loss, [x])
    found = record_memory(lambda: torch.autograd.grad(loss(x), x), backbone, (), {}, "cpu")
    for layer in range(2):
        inside = {at for at, call in enumerate(inventory.calls) if f"layers.{layer}." in call.part}
        counted = sum(kept.size for kept in inventory.storages if any(calls & inside for calls in kept.holders))
        assert max(found.held[f"model.model.layers.{layer}"]) == pytest.approx(counted, rel=0.05)


def test_what_is_computed_again_is_not_held() -> None:
    plain = profiled("timer")
    again = profiled("timer", recompute=[part for part in part_names(frozen("timer")) if part.endswith(".sublayers")])
    for layer in range(2):
        name = f"model.model.layers.{layer}"
        assert max(again.holdings.held[name]) < 0.6 * max(plain.holdings.held[name])


@pytest.mark.parametrize("adapter", ["adapts", "fine-tune"])
def test_other_adapters_can_be_profiled(adapter: str) -> None:
    found = profiled("timer", adapter=adapter)
    weights = storage_bytes(frozen("timer").parameters())
    if adapter == "fine-tune":
        assert max(found.holdings.held["weight gradients"]) >= 0.9 * weights
        assert found.holdings.at_peak()["optimizer state"] >= 1.8 * weights


def test_json_holds_everything_and_the_figure_is_drawn(tmp_path: Path) -> None:
    found = profiled("timer")
    found.save(tmp_path / "p.json")
    read = json.loads((tmp_path / "p.json").read_text())
    assert read["peak_bytes"] == sum(read["bytes_at_peak"].values())
    assert len(read["memory"]["seconds"]) == len(read["memory"]["held"]["workspace"])
    found.plot().savefig(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found)
    text = console.export_text()
    assert all(phase in text for phase in PHASES)
    assert "model.model.layers.1" in text


def test_the_command_line_profiles(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--backbone", "fracast", "--context-length", 32, "--channels", 2, "--batch-size", 2, "--horizon", 8]
    assert run("profile", *options, "--steps", 1, "--json", tmp_path / "p.json", "--plot", tmp_path / "p.png") == 0
    shown = capfd.readouterr()
    assert "frozen forward" in shown.out
    assert shown.err == ""  # the profiler's library would tell when it starts and stops
    assert (tmp_path / "p.png").stat().st_size > 0
    assert json.loads((tmp_path / "p.json").read_text())["backbone"] == "fracast"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 0}, "channels=0: expected"),
        ({"micro_batch": 3}, "micro_batch=3: expected a divisor of batch_size=4"),
        ({"adapter": "zero-shot"}, "nothing to train"),
        ({"recompute": ["model.x"]}, "no part of this model"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        profiled("timer", **settings)


def test_it_is_reached_from_the_package() -> None:
    assert dualweaver.profile is profile


def test_an_inner_phase_stops_the_outer_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("dualweaver.planning.step.time.perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))
    with watch.phase("backward"), watch.phase("fusion"):
        pass
    assert watch.seconds["backward"] == 1 + 4
    assert watch.seconds["fusion"] == 2


FRESH = """
import torch
from dualweaver.backbones.timer import TimerBackbone, TimerConfig, TimerForPrediction
from dualweaver.planning.profiling import profile
torch.set_num_threads(1)
small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
backbone = TimerBackbone(TimerForPrediction(TimerConfig(input_token_len=16, output_token_lens=(16,), **small)),
                         context_length=512)
found = profile(backbone, channels=8, batch_size=10, horizon=16, context_length=512, steps=1)
print(found.holdings.peak, found.resident)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process its peak")
def test_the_parts_sum_to_what_the_system_counts_within_a_tenth() -> None:
    """In a process of its own, whose memory is of no other test."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    peak, resident = map(int, done.stdout.split())
    assert peak > 90e6
    assert resident == pytest.approx(peak, rel=0.1)
