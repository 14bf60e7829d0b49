"""From a backbone, an adapter and a budget to a plan: probes, expressions, all plans, the fastest that fits."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table
from torch import nn

from dualweaver.adapters import Adapter, make_adapter
from dualweaver.allocator import keep_freed_memory
from dualweaver.backbones import Backbone
from dualweaver.errors import SettingError
from dualweaver.planning.costs import Costs, InnerProbe, probe_costs
from dualweaver.planning.limits import parse_bytes
from dualweaver.planning.memory import storage_bytes
from dualweaver.planning.planner import Plan, choose_plan, pareto, plans_for, plans_table
from dualweaver.planning.step import Shape, training_device
from dualweaver.precision import PRECISIONS, load_in_precision, precision_of
from dualweaver.seeding import seeded

if TYPE_CHECKING:  # settings check a budget by this package
    from dualweaver.settings import FitSettings

__all__ = ["Outcome", "plan", "plan_stages", "plan_training", "probe_shape"]

PATIENCE = 1.0  # seconds that the largest probe may take, roughly
GROWTH = 4  # from one probe to the next
SHOWN = 12  # plans of the frontier that are printed, about


@dataclass(frozen=True)
class Outcome:
    """The chosen plan, and those that no other one beats in both memory and time, smallest first."""

    chosen: Plan
    frontier: Sequence[Plan]

    def __rich__(self) -> Table:
        windows = self.chosen.micro_batch * self.chosen.accumulate * self.chosen.devices
        every = max(1, len(self.frontier) // SHOWN)
        shown = [one for at, one in enumerate(self.frontier) if at % every == 0 or self.chosen.same_cost(one)]
        return plans_table(shown, self.chosen, f"plans for {windows} windows a step")


def plan_training(
    backbones: Sequence[Backbone], adapter: Adapter, shape: Shape, budget: float, *, devices: int = 1
) -> Outcome:
    """The fastest plan within a budget.

    Args:
        backbones: the same model in every precision that may be chosen, each on its device.
        adapter: for the shape's channels.
        shape: of a step of the optimizer.
        budget: bytes on each device.
        devices: that may share a batch.

    Raises:
        SettingError: nothing fits; the message says what it would take.
    """
    with keep_freed_memory():  # as in training; given back at the end
        costs = [probe_shape(backbone, adapter, shape, room=budget / 2) for backbone in backbones]
    plans = [one for cost in costs for one in plans_for(cost, adapter, shape, devices=devices)]
    return Outcome(choose_plan(plans, budget, costs, adapter, shape), pareto(plans))


def probe_shape(
    backbone: Backbone,
    adapter: Adapter,
    shape: Shape,
    clock: Callable[[], float] = time.perf_counter,
    room: float = math.inf,
) -> Costs:
    """Probes at the shape itself, the inner ones as large as patience allows, and as `room` for all (bytes) does."""
    room -= storage_bytes(backbone.parameters())
    thawed: AbstractContextManager[object] = backbone.unfrozen() if adapter.trains_backbone else nullcontext()
    with thawed, seeded(0):
        sizes, most = [2], max(4, shape.batch_size * adapter.series_per_step)
        while len(sizes) < 2 or sizes[-1] < most:
            start = time.perf_counter()
            peak = InnerProbe(adapter, backbone, sizes[-1], shape.context_length, shape.horizon).peak()
            enough = (time.perf_counter() - start) * GROWTH > PATIENCE or peak * GROWTH > room
            if enough and len(sizes) > 1:
                break
            sizes.append(min(sizes[-1] * (2 if enough else GROWTH), most))
        counts = sorted({1, min(2, shape.batch_size), min(4, shape.batch_size) if shape.channels < 64 else 1})
        return probe_costs(
            lambda _: copy.deepcopy(adapter),  # probes train it
            backbone,
            shape.horizon,
            precision=precision_of(backbone),
            pieces=[(size, shape.context_length) for size in sizes],
            windows=[(count, shape.channels, shape.context_length) for count in counts],
            clock=clock,
        )


def plan_stages(
    stages: Sequence[Adapter], backbone: Backbone, settings: FitSettings, context_length: int, folder: Path | None
) -> None:
    """Give every stage of a fit a plan within the settings' budget.

    Args:
        stages: what is trained in turn.
        backbone: that they are trained around.
        settings: of the fit.
        context_length: past steps.
        folder: where plans are kept for a fit that goes on later: timings differ from run to run, and with the sizes of
            pieces the order of sums, so that bits would.
    """
    assert settings.memory_budget is not None
    budget = parse_bytes(settings.memory_budget)
    if settings.trains_backbone:  # a copy, beside the untouched one
        budget -= storage_bytes(backbone.parameters())
    for stage in stages:
        name = f"{stage.name}-after-fine-tuning" if settings.fine_tune else stage.name
        file = None if folder is None else folder / f"{name}.plan.json"
        if file is not None and file.exists():
            stage.plan = Plan.from_dict(json.loads(file.read_text()))
        else:
            shape = Shape(stage.channels, settings.batch_size // settings.devices, context_length, settings.horizon)
            here = next(backbone.parameters(), torch.zeros(())).device
            stage.plan = plan_training([backbone.to(training_device())], stage, shape, budget).chosen
            backbone.to(here)
            if file is not None:
                file.write_text(json.dumps(asdict(stage.plan), indent=2) + "\n")
        stage.pairs_at_once, stage.series_at_once = stage.plan.rows, stage.plan.series


def plan(
    backbone: str | nn.Module = "fracast",
    *,
    memory_budget: str | float,
    channels: int = 7,
    batch_size: int = 32,
    horizon: int = 96,
    context_length: int | None = None,
    adapter: str = "dualweaver",
    objective: str = "reconstruction",
    fusion: str = "mlp",
    precision: str = "32",
    devices: int = 1,
    seed: int = 0,
) -> Outcome:
    """Plan the training of some shape, without data.

    Args:
        backbone, horizon, context_length, adapter, objective, fusion: as for `DualWeaver`.
        memory_budget: bytes on each device, such as "2GB" or 2e9; see `dualweaver.planning.planner`.
        channels: all of them are targets.
        batch_size: windows of a step of the optimizer, whatever the plan.
        precision: "32", "bf16", or "auto" to let the plan choose.
        devices: that may share a batch.
        seed: of the adapter's weights.

    Raises:
        SettingError: an argument is out of range, or nothing fits; the message says what it would take.
    """
    budget = parse_bytes(memory_budget)
    counts = (("channels", channels), ("batch_size", batch_size), ("horizon", horizon), ("devices", devices))
    for name, value in counts:
        if value < 1:
            raise SettingError(f"{name}={value!r}: expected a whole number, 1 or more")
    if precision not in PRECISIONS:
        raise SettingError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
    extra = {"objective": objective, "fusion": fusion} if adapter == "dualweaver" else {}
    with seeded(seed):
        made = make_adapter(adapter, channels, range(channels), **extra)
    if not any(weight.requires_grad for weight in made.parameters()) and not made.trains_backbone:
        raise SettingError(f"adapter={adapter!r} has nothing to train")
    wanted = ("32", "bf16") if precision == "auto" and not made.trains_backbone else (precision,)
    backbones = [load_in_precision(backbone, one, context_length).to(training_device()) for one in wanted]
    shape = Shape(channels, batch_size, context_length or backbones[0].context_length, horizon)
    return plan_training(backbones, made, shape, budget, devices=devices)
