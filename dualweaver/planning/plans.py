"""The fastest way to take a step within a memory budget.

As in Mist (arXiv 2503.19050), all choices are searched together, on expressions for memory and time instead of runs:
the micro-batch and with it the accumulation, the rows of a piece, the parts that are computed again, the precision, and
how many devices share a batch. The effective batch stays what was asked for; what changes is the order of sums, and
with the micro-batch the draws of dropout.

A budget is of what torch allocates for training on one device: weights, their gradients, the optimizer's state,
activations and workspace. The interpreter, its libraries and the table itself are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from dualweaver.adapters import Adapter
from dualweaver.compute.plan import Plan
from dualweaver.errors import SettingError
from dualweaver.planning.costs import Costs, rows_of
from dualweaver.planning.memory import storage_bytes
from dualweaver.planning.step import Shape

__all__ = ["choose_plan", "pareto", "plans_for", "plans_table"]

MARGIN = 0.05  # of the budget that is left free: expressions are not exact
SERIES_AT_ONCE = 2048  # at most, without gradients
LINK = 1e9  # bytes a second between devices where nothing else is known: ten-gigabit Ethernet


def plans_for(costs: Costs, adapter: Adapter, shape: Shape, *, devices: int = 1, link: float = LINK) -> list[Plan]:
    """Everything that could be done, with what it is expected to take.

    Args:
        costs: of the backbone in one precision.
        adapter: for the shape's channels.
        shape: of a step of all devices together.
        devices: at hand; any number of them that divides the batch can be used.
        link: bytes a second between two devices.
    """
    plans = []
    for width in (count for count in _divisors(devices) if shape.batch_size % count == 0):
        own = Shape(shape.channels, shape.batch_size // width, shape.context_length, shape.horizon)
        for windows in _divisors(own.batch_size):
            for rows in _pieces(rows_of(adapter, windows)) if costs.pairwise else [rows_of(adapter, windows)]:
                for index, (choice, _, _) in enumerate(costs.choices):
                    seconds = costs.seconds(adapter, own, windows, rows, index)
                    plans.append(
                        Plan(
                            windows,
                            own.batch_size // windows,
                            rows,
                            SERIES_AT_ONCE,
                            choice.parts,
                            costs.precision,
                            width,
                            costs.bytes(adapter, own, windows, rows, index),
                            seconds
                            + _exchange_seconds(adapter, costs, width, seconds / (own.batch_size // windows), link),
                        )
                    )
    return plans


def _exchange_seconds(adapter: Adapter, costs: Costs, width: int, last: float, link: float) -> float:
    """What gradients take to be averaged by a ring, beyond the backward pass that hides them (half of the last batch).

    An adapter's gradients are ready only at the very end of the backward pass: nothing hides theirs.
    """
    sent = 2 * (width - 1) / width * storage_bytes(adapter.parameters()) / link
    if not adapter.trains_backbone:
        return sent
    return max(0.0, sent + 2 * (width - 1) / width * costs.fixed / 3 / link - last / 2)


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other one beats in both memory and time, smallest first."""
    best: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.bytes, plan.seconds)):
        if not best or plan.seconds < best[-1].seconds:
            best.append(plan)
    return best


def choose_plan(
    plans: Sequence[Plan], budget: float, costs: Sequence[Costs], adapter: Adapter, shape: Shape, margin: float = MARGIN
) -> Plan:
    """The fastest one within the budget, which also says how many series a forecast may take at once.

    Args:
        plans: those of all `costs`.
        budget: bytes.
        costs: one a precision.
        adapter, shape: that the plans are for.
        margin: share of the budget that is left free.

    Raises:
        SettingError: none is; the message says what the least is, and what would make it less.
    """
    room = budget * (1 - margin)
    fitting = [plan for plan in plans if plan.bytes <= room]
    if not fitting:
        least = min(plans, key=lambda plan: plan.bytes)
        fixed = min(cost.fixed for cost in costs)
        needed = least.bytes / (1 - margin)
        raise SettingError(
            f"memory_budget of {budget / 1e6:.4g} MB: training takes at least {needed / 1e6:.4g} MB "
            f"({fixed / 1e6:.4g} MB of it weights), with {least.micro_batch} of {least.micro_batch * least.accumulate} "
            f"windows at once, {least.rows} rows at once and {len(least.recompute)} parts computed again; give it that "
            "much, or take a shorter context_length, fewer columns"
            + ("" if least.precision == "bf16" else ", or precision='bf16'")
        )
    best = min(fitting, key=lambda plan: (plan.seconds, plan.bytes))
    cost = next(cost for cost in costs if cost.precision == best.precision)
    fit = [1, *(2**power for power in range(1, SERIES_AT_ONCE.bit_length()))]
    series = [count for count in fit if cost.resting_bytes(adapter, shape, best.micro_batch, count) <= room]
    return replace(best, series=max(series, default=1))


def plans_table(plans: Sequence[Plan], chosen: Plan | None, title: str) -> Table:
    """For the terminal; the chosen one is marked."""
    table = Table("", "MB", "s/step", "windows", "times", "rows", "again", "format", "devices", title=title)
    table.caption = "windows and rows at once; parts that the backward pass computes again"
    for plan in plans:
        same = chosen is not None and chosen.same_cost(plan)
        table.add_row(
            "chosen" if same else "",
            f"{plan.bytes / 1e6:.1f}",
            f"{plan.seconds:.4g}",
            str(plan.micro_batch),
            str(plan.accumulate),
            str(plan.rows),
            str(len(plan.recompute)),
            plan.precision,
            str(plan.devices),
        )
    return table


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _pieces(rows: int) -> list[int]:
    """Sizes of equal pieces, from all rows down to one."""
    counts = {math.ceil(rows / math.ceil(rows / size)) for size in (2**power for power in range(rows.bit_length()))}
    return sorted(counts | {rows})
