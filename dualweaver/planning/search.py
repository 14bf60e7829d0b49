"""From a backbone, an adapter and a budget to a plan: probes, expressions, all plans, the fastest that fits."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich.table import Table
from torch import nn

from dualweaver.adapters import Adapter, make_adapter
from dualweaver.backbones import Backbone
from dualweaver.backbones.precision import load_in_precision, precision_of
from dualweaver.compute.allocator import keep_freed_memory
from dualweaver.compute.limits import parse_bytes
from dualweaver.compute.plan import Plan
from dualweaver.compute.seeding import seeded
from dualweaver.errors import SettingError
from dualweaver.planning.costs import Costs, InnerProbe, probe_costs
from dualweaver.planning.memory import storage_bytes
from dualweaver.planning.plans import choose_plan, pareto, plans_for, plans_table
from dualweaver.planning.step import Shape, training_device
from dualweaver.settings import PRECISIONS, Options

__all__ = ["Outcome", "plan", "plan_training", "probe_shape"]

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


def plan(
    backbone: str | nn.Module = Options.backbone,
    *,
    memory_budget: str | float,
    channels: int = 7,
    batch_size: int = Options.batch_size,
    horizon: int = Options.horizon,
    context_length: int | None = Options.context_length,
    adapter: str = Options.adapter,
    objective: str = Options.objective,
    fusion: str = Options.fusion,
    precision: str = Options.precision,
    devices: int = Options.devices,
    seed: int = Options.seed,
) -> Outcome:
    """Plan the training of some shape, without data.

    Args:
        backbone, horizon, context_length, adapter, objective, fusion: as for `DualWeaver`.
        memory_budget: bytes on each device, such as "2GB" or 2e9; see `dualweaver.planning.plans`.
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
