"""Plans under three budgets, against lowering the micro-batch until it fits."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import published
import speed
import torch
from claims import HORIZON, ROUNDS, Row, adapter_for, at_least, at_most, peak_of, record, seconds_of

from dualweaver.backbones import Backbone
from dualweaver.planning.memory import storage_bytes
from dualweaver.planning.plans import Plan, choose_plan, plans_for
from dualweaver.planning.search import probe_shape
from dualweaver.planning.step import Shape, TrainingStep

__all__ = ["describe", "plans"]


def naive_step(backbone: Any, shape: Shape, windows: int, *, theirs: bool) -> Callable[[], None]:
    """What is done without a planner: float32, everything that a micro-batch needs kept at once.

    `theirs` is the published procedure (its loss of the untouched model computed at every step, fusion evaluated four
    times, dense masks, PyTorch's products); else it is our objective with all pairs in one piece.
    """
    adapter = adapter_for(shape.channels, "paper")
    adapter.pairs_at_once = shape.channels * windows
    step = TrainingStep(adapter, backbone, shape, micro_batch=windows)
    if not theirs:
        return step
    loss = lambda context, labels: published.timer_loss(backbone.model, context, labels)  # noqa: E731
    table = step.data.train_windows.__getitems__(range(shape.batch_size))

    def run() -> None:
        for part in table.split(windows):
            value = published.training_loss(adapter.weaver, loss, part, shape.context_length, backbone.patch)
            (value / step.accumulate).backward()
        step.optimizer.step()

    return run


def naive(backbone: Any, shape: Shape, *, theirs: bool) -> dict[int, tuple[float, Callable[[], None]]]:
    """Peak and step of every micro-batch that a user comes by who halves it until it fits."""
    weights = storage_bytes([*backbone.parameters(), *backbone.buffers()])
    found, windows = {}, shape.batch_size
    while windows:
        run = naive_step(backbone, shape, windows, theirs=theirs)
        run()
        found[windows] = weights + record(run, backbone), run
        windows //= 2
    return found


def plans(quick: bool) -> list[Row]:
    """Three budgets for Timer at context 2880, seven channels, four windows a step.

    They are such that one, two or all four windows fit without a planner.
    """
    context = 480 if quick else 2880
    backbone = speed.timer(quick, context)
    half = copy.deepcopy(backbone).to(torch.bfloat16)
    shape, adapter = Shape(7, 4, context, HORIZON), adapter_for(7, "paper")
    costs = [probe_shape(one, adapter, shape, time.process_time) for one in (backbone, half)]
    rivals = {
        "published procedure": naive(backbone, shape, theirs=True),
        "our objective": naive(backbone, shape, theirs=False),
    }
    rows = []
    for windows in (1, 2, 4):
        budget = 1.05 * rivals["our objective"][windows][0]
        name = f"budget of {budget / 1e6:.0f} MB, Timer, context {context}, C=7, 4 windows"
        found, peaks = {}, {}
        for label, known in (("float32", costs[:1]), ("precision left to the plan", costs)):
            choices = [one for cost in known for one in plans_for(cost, adapter, shape)]
            chosen = found[label] = choose_plan(choices, budget, known, adapter, shape)
            own = half if chosen.precision == "bf16" else backbone
            with chosen.applied(adapter, own):
                peaks[label] = peak_of(TrainingStep(adapter, own, shape, micro_batch=chosen.micro_batch))
        largest = {
            rival: max((count for count, (peak, _) in steps.items() if peak <= budget), default=None)
            for rival, steps in rivals.items()
        }
        runs: dict[str, Callable[[], object]] = {
            label: planned_step(chosen, half if chosen.precision == "bf16" else backbone, shape)
            for label, chosen in found.items()
        }
        runs |= {rival: rivals[rival][count][1] for rival, count in largest.items() if count}
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(1 if quick else ROUNDS):
            for label, run in runs.items():
                times[label].append(seconds_of(run))
        for label, chosen in found.items():
            text = f"{label}: peak against the budget"
            rows.append(at_most(name, text, peaks[label] / budget, 1, describe(chosen)))
            for rival, count in largest.items():
                if count is None:
                    text = f"{label}: against {rival}: not even one window fits there"
                    rows.append(at_least(name, text, float("inf"), 1.28))
                    continue
                ratio = statistics.median(b / a for a, b in zip(times[label], times[rival], strict=True))
                text = f"{label}: times as fast as {rival}, micro-batch lowered to {count}"
                wanted = 0 if quick or (label == "float32" and rival == "our objective") else 1.28
                rows.append(at_least(name, text, ratio, wanted))
        print(f"{name} done", file=sys.stderr, flush=True)
    return rows


def planned_step(chosen: Plan, backbone: Backbone, shape: Shape) -> Callable[[], object]:
    adapter = adapter_for(shape.channels, "paper")
    step = TrainingStep(adapter, backbone, shape, micro_batch=chosen.micro_batch)

    def run() -> None:
        with chosen.applied(adapter, backbone):
            step()
        step.forget_gradients()

    run()  # the untouched model's losses are known from the second look at a window on
    return run


def describe(chosen: Plan) -> str:
    return (
        f"{chosen.accumulate} x {chosen.micro_batch} windows, {chosen.rows} pairs at once, "
        f"{len(chosen.recompute)} parts computed again, {chosen.precision}"
    )
