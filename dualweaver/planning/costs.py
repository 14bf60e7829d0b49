"""Memory and time of a step as expressions in its shape, fitted to a handful of probes.

A step is made of an outer part, once a micro-batch (fusion, surrogates, losses, their gradients), and of inner pieces
(so many series through the frozen model, forward and backward). With S series in a piece, L steps of context, m windows
of C channels and a fusion of width H,

    inner   bytes and seconds   1, S, S L, S L^2            the last one is attention
    outer   bytes               1, m C L, m L H             what is held while pieces run, and its own peak
            seconds             1, m C L, m L C H, C H
    peak  = weights + optimizer + max(held + inner, outer)
    time  = outer + pieces * inner

Weights and the optimizer's state are counted, not fitted. Coefficients are the non-negative ones with the least
relative error. What computing parts again saves and costs is measured at one context and is linear in S L.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from dualweaver.adapters import Adapter, DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.compute.recompute import recomputing
from dualweaver.method import fusion_width
from dualweaver.planning.choice import Choice, frontier
from dualweaver.planning.memory import record_memory, storage_bytes
from dualweaver.planning.parts import take_inventory
from dualweaver.planning.step import Shape, TrainingStep

__all__ = ["Costs", "Expression", "InnerProbe", "probe_costs", "rows_of"]

ROUNDS = 3  # of every timing; the median counts


@dataclass(frozen=True)
class Expression:
    """A non-negative combination of terms."""

    coefficients: tuple[float, ...]

    def __call__(self, terms: Sequence[float]) -> float:
        return float(np.dot(self.coefficients, terms))

    @classmethod
    def fitted(cls, terms: Sequence[Sequence[float]], values: Sequence[float]) -> Expression:
        """The combination with the least relative error over the probes."""
        matrix, wanted = np.asarray(terms, dtype=float), np.maximum(np.asarray(values, dtype=float), 1e-9)
        size = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        found, _ = nnls(matrix / size / wanted[:, None], np.ones(len(wanted)))
        return cls(tuple(found / size))


@dataclass(frozen=True)
class Costs:
    """What is known of one backbone in one precision under one adapter.

    Attributes:
        fixed: bytes of the backbone's weights and, where it is trained, of its optimizer's state.
        pairwise: whether a micro-batch can go through in pieces.
        inner_bytes, inner_seconds, held, outer_bytes, outer_seconds: see the module.
        inference: bytes of a forecast without gradients, of so many series.
        choices: sets of parts to compute again, best first; bytes saved and seconds added per series and step of
            context.
    """

    precision: str
    fixed: int
    pairwise: bool
    inner_bytes: Expression
    inner_seconds: Expression
    held: Expression
    outer_bytes: Expression
    outer_seconds: Expression
    inference: Expression
    choices: Sequence[tuple[Choice, float, float]] = field(default_factory=tuple)

    def bytes(self, adapter: Adapter, shape: Shape, windows: int, rows: int, choice: int = 0) -> float:
        """Peak of a step.

        Args:
            adapter: for the shape's channels.
            shape: of the step.
            windows: of a micro-batch.
            rows: of a piece, see `rows_of`.
            choice: of the parts that are computed again.
        """
        series, length = rows * _series_per_row(adapter), shape.context_length
        inner = self.inner_bytes(_inner_terms(series, length)) - self.choices[choice][1] * series * length
        terms = _outer_terms(shape, windows)
        around = max(self.held(terms[:3]) + inner, self.outer_bytes(terms[:3]))
        return self.fixed + 4 * storage_bytes(adapter.parameters()) + around

    def resting_bytes(self, adapter: Adapter, shape: Shape, windows: int, series: int) -> float:
        """Peak of a forecast of so many windows without gradients, `series` of them at once, while training rests."""
        resting = self.inference(_inner_terms(series, shape.context_length)[:3])
        return self.fixed + 4 * storage_bytes(adapter.parameters()) + self.held(_outer_terms(shape, windows)) + resting

    def seconds(self, adapter: Adapter, shape: Shape, windows: int, rows: int, choice: int = 0) -> float:
        """Time of a step."""
        series, length = rows * _series_per_row(adapter), shape.context_length
        inner = self.inner_seconds(_inner_terms(series, length)) + self.choices[choice][2] * series * length
        pieces = math.ceil(rows_of(adapter, windows) / rows)
        outer = self.outer_seconds(_timed_terms(shape, windows))
        return shape.batch_size / windows * (outer + pieces * inner)


def rows_of(adapter: Adapter, windows: int) -> int:
    """Rows of a micro-batch that pieces are made of: pairs of surrogates, or series."""
    return windows * adapter.series_per_step // _series_per_row(adapter)


def _series_per_row(adapter: Adapter) -> int:
    return 2 if isinstance(adapter, DualWeaverAdapter) else 1


def _inner_terms(series: int, length: int) -> tuple[float, ...]:
    return 1.0, series, series * length, series * length**2


def _outer_terms(shape: Shape, windows: int) -> tuple[float, ...]:
    width = fusion_width(shape.channels)
    cells = windows * shape.context_length
    return 1.0, cells * shape.channels, cells * width


def _timed_terms(shape: Shape, windows: int) -> tuple[float, ...]:
    width = fusion_width(shape.channels)
    cells = windows * shape.context_length
    return 1.0, cells * shape.channels, cells * shape.channels * width, shape.channels * width


def probe_costs(
    make_adapter: Callable[[int], Adapter],
    backbone: Backbone,
    horizon: int,
    *,
    precision: str,
    pieces: Sequence[tuple[int, int]],
    windows: Sequence[tuple[int, int, int]],
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Run the probes and fit.

    Args:
        make_adapter: an adapter for so many channels.
        backbone: on the device where it will be trained.
        horizon: steps to forecast.
        precision: that of the backbone's weights, for the record.
        pieces: (series, context) of each inner probe; the longest context is where parts are measured.
        windows: (windows, channels, context) of each outer probe.
        clock: of the timings.
    """
    sample = make_adapter(1)
    inner = [InnerProbe(sample, backbone, series, length, horizon) for series, length in pieces]
    device = inner[0].device
    peaks = [probe.peak() for probe in inner]
    times = [_median(probe, clock) for probe in inner]
    resting = [_peak(probe.without_gradients, backbone, device)[0] for probe in inner]
    terms = [_inner_terms(series, length) for series, length in pieces]
    outer = [
        _outer_probe(make_adapter(channels), backbone, count, channels, length, horizon, clock)
        for count, channels, length in windows
    ]
    shapes = [(Shape(channels, count, length, horizon), count) for count, channels, length in windows]
    around = [_outer_terms(shape, count) for shape, count in shapes]
    timed = [_timed_terms(shape, count) for shape, count in shapes]
    fixed = storage_bytes([*backbone.parameters(), *backbone.buffers()]) * (3 if sample.trains_backbone else 1)
    return Costs(
        precision,
        fixed,
        isinstance(sample, DualWeaverAdapter),
        Expression.fitted(terms, peaks),
        Expression.fitted(terms, times),
        Expression.fitted(around, [held for held, _, _ in outer]),
        Expression.fitted(around, [peak for _, peak, _ in outer]),
        Expression.fitted(timed, [seconds for _, _, seconds in outer]),
        Expression.fitted([row[:3] for row in terms], resting),
        _choices(sample, backbone, max(length for _, length in pieces), horizon, clock),
    )


class InnerProbe:
    """So many series through the backbone, forward and backward."""

    def __init__(self, adapter: Adapter, backbone: Backbone, series: int, length: int, horizon: int) -> None:
        self.backbone, self.horizon, self.native = backbone, horizon, adapter.native_loss
        self.device = next(backbone.parameters(), torch.zeros(())).device
        generator = torch.Generator().manual_seed(0)
        future = max(horizon, backbone.label_horizon(horizon))
        table = 0.1 * torch.randn(series, length + future, generator=generator).cumsum(dim=1).to(self.device)
        self.context = table[:, :length].clone().requires_grad_()
        start = backbone.label_start(length) if self.native else length
        self.labels = table[:, start : length + (backbone.label_horizon(horizon) if self.native else horizon)]
        self.wanted = [self.context, *(weight for weight in backbone.parameters() if weight.requires_grad)]

    def loss(self, context: Tensor) -> Tensor:
        if self.native:
            generator = torch.Generator().manual_seed(0)
            return self.backbone.loss(context, self.labels, horizon=self.horizon, generator=generator).sum()
        return (self.backbone(context, self.horizon) - self.labels).square().sum()

    def __call__(self) -> Tensor:
        return torch.autograd.grad(self.loss(self.context), self.wanted, allow_unused=True)[0]

    def peak(self) -> int:
        """Bytes at most, above those before."""
        return _peak(self, self.backbone, self.device)[0]

    def without_gradients(self) -> Tensor:
        with torch.no_grad():
            return self.backbone(self.context.detach(), self.horizon)


def _choices(
    adapter: Adapter, backbone: Backbone, length: int, horizon: int, clock: Callable[[], float]
) -> tuple[tuple[Choice, float, float], ...]:
    """Sets of parts to compute again; what they save is measured: while a part runs again there is workspace too."""
    series = 4
    probe = InnerProbe(adapter, backbone, series, length, horizon)
    inventory = take_inventory(backbone, probe.loss, [probe.context], clock=clock)
    found, plain = [], 0
    for choice in frontier(inventory):
        with recomputing(backbone, choice.parts):
            peak = probe.peak()
        plain = plain or peak  # the first one computes nothing again
        found.append((choice, (plain - peak) / (series * length), choice.seconds / (series * length)))
    return tuple(found)


class _Stub(Backbone):
    """Costs nothing and asks for the windows that another backbone asks for."""

    name = "stub"

    def __init__(self, like: Backbone) -> None:
        super().__init__(context_length=like.context_length, native_horizon=like.native_horizon)
        self.like = [like]  # not a module of this one
        self.anchor = torch.nn.Parameter(torch.zeros(1, device=next(like.parameters(), torch.zeros(())).device))
        self.loss_kind = like.loss_kind  # type: ignore[misc]
        self.freeze()

    def native(self, context: Tensor) -> Tensor:
        return self(context)

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        return (context[:, -1:] + self.anchor).expand(-1, horizon or self.native_horizon)

    def label_start(self, context_length: int) -> int:
        return self.like[0].label_start(context_length)

    def label_horizon(self, horizon: int) -> int:
        return self.like[0].label_horizon(horizon)

    def loss(
        self, context: Tensor, labels: Tensor, *, horizon: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return (context[:, -1:] + self.anchor - labels[:, -1:]).square()

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None, **kwargs: Any) -> Backbone:
        raise NotImplementedError


def _outer_probe(
    adapter: Adapter,
    backbone: Backbone,
    windows: int,
    channels: int,
    length: int,
    horizon: int,
    clock: Callable[[], float],
) -> tuple[float, float, float]:
    """Bytes held while pieces run, peak, seconds, all of them beside the backbone's."""
    stub = _Stub(backbone)
    stub.requires_grad_(adapter.trains_backbone)
    adapter.pairs_at_once = math.ceil(rows_of(adapter, windows) / 2)  # in pieces, as in the real run
    step = TrainingStep(adapter, stub, Shape(channels, windows, length, horizon))
    step()
    step.forget_gradients()
    held: list[Tensor] = []

    def forward() -> None:
        batch = step.data.train_windows.__getitems__(range(windows)).to(step.device)
        known = torch.ones(windows, channels, device=step.device) if adapter.needs_reference else None
        held.append(adapter.objective(stub, batch, length, horizon, known))

    gradients = storage_bytes(weight for weight in adapter.parameters() if weight.requires_grad)
    last = _peak(forward, stub, step.device)[1]
    held.clear()
    peak = _peak(step, stub, step.device)[0] - gradients
    step.forget_gradients()
    return last, max(peak, last), _median(step, clock)


def _peak(run: Callable[[], object], model: Backbone, device: torch.device) -> tuple[int, int]:
    """Bytes at most and at the end, above those before."""
    totals = record_memory(run, model, (), {}, device.type).totals
    return max(totals), totals[-1]


def _median(run: Callable[[], object], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = clock()
        result = run()
        if isinstance(result, Tensor):
            float(result.flatten()[0])  # waits for a device
        seconds.append(clock() - start)
    return statistics.median(seconds)
