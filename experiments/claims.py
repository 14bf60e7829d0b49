"""Claims about memory and time, as rows of a table, and the measurements that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.planning.memory import record_memory, storage_bytes
from dualweaver.planning.step import TrainingStep

__all__ = [
    "HORIZON",
    "ROUNDS",
    "Row",
    "adapter_for",
    "at_least",
    "at_most",
    "peak_of",
    "record",
    "seconds_of",
    "to_markdown",
]

HORIZON = 96
ROUNDS = 3  # of every timing


@dataclass(frozen=True)
class Row:
    """One claim: a ratio that may be at most, or has to be at least, so much."""

    trial: str
    claim: str
    wanted: str
    measured: float
    holds: bool
    detail: str = ""


def at_most(trial: str, claim: str, measured: float, limit: float, detail: str = "") -> Row:
    return Row(trial, claim, f"<= {limit:g}", measured, measured <= limit, detail)


def at_least(trial: str, claim: str, measured: float, limit: float, detail: str = "") -> Row:
    return Row(trial, claim, f">= {limit:g}", measured, measured >= limit, detail)


def to_markdown(rows: Sequence[Row], heading: str) -> str:
    lines = [heading, "", "| measured | claim | wanted | found | holds | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.trial} | {row.claim} | {row.wanted} | {row.measured:.3f} | "
        f"{'yes' if row.holds else 'no'} | {row.detail} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def adapter_for(channels: int, objective: str = "reconstruction") -> DualWeaverAdapter:
    torch.manual_seed(1)
    return DualWeaverAdapter(channels, range(channels), objective=objective)


def record(run: Callable[[], object], backbone: Backbone) -> int:
    return record_memory(run, backbone, (), {}, "cpu").peak


def seconds_of(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_of(step: TrainingStep) -> float:
    """Of one step, weights and optimizer included, the table not."""
    step.forget_gradients()
    weights = [*step.backbone.parameters(), *step.backbone.buffers(), *step.adapter.parameters()]
    state = [part for entry in step.optimizer.state.values() for part in entry.values()]
    constant = {"weights": storage_bytes(weights), "optimizer state": storage_bytes(state)}
    return record_memory(step, step.backbone, step.trained, constant, "cpu").peak
