"""How a step of the optimizer is taken within a memory budget: what planning chooses and training keeps to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from dualweaver.compute.recompute import recomputing

__all__ = ["Plan"]


class Limited(Protocol):
    """What a plan limits: an adapter."""

    pairs_at_once: int | None
    series_at_once: int | None


@dataclass(frozen=True)
class Plan:
    """How to take a step of the optimizer.

    Attributes:
        micro_batch: windows that go through at once, on each device.
        accumulate: micro-batches of a step.
        rows: pairs of surrogates (or series) that keep their activations at once.
        series: that go through the frozen model at once where no gradients are kept.
        recompute: parts of the backbone that the backward pass computes again.
        precision: of the backbone's weights.
        devices: that share a batch.
        bytes: expected peak on one device.
        seconds: expected time of a step.
    """

    micro_batch: int
    accumulate: int
    rows: int
    series: int
    recompute: tuple[str, ...]
    precision: str
    devices: int
    bytes: float
    seconds: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The opposite of `dataclasses.asdict`, from JSON."""
        return cls(**{**values, "recompute": tuple(values["recompute"])})

    def same_cost(self, other: Plan) -> bool:
        return (self.bytes, self.seconds) == (other.bytes, other.seconds)

    @contextmanager
    def applied(self, adapter: Limited, backbone: nn.Module) -> Iterator[None]:
        """Training and forecasting inside keep to the plan; batches are the caller's to make."""
        before = adapter.pairs_at_once, adapter.series_at_once
        adapter.pairs_at_once, adapter.series_at_once = self.rows, self.series
        try:
            with recomputing(backbone, self.recompute):
                yield
        finally:
            adapter.pairs_at_once, adapter.series_at_once = before
