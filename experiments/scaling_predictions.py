"""Predicted against measured memory and time, on shapes that the expressions were not fitted to."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import speed
import torch
from claims import HORIZON, ROUNDS, Row, adapter_for, at_most, peak_of, seconds_of

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone, load_backbone
from dualweaver.backbones.precision import precision_of
from dualweaver.backbones.sundial import SundialBackbone, SundialConfig, SundialForPrediction
from dualweaver.planning.costs import Costs, probe_costs
from dualweaver.planning.step import Shape, TrainingStep

__all__ = ["predictions"]


def sundial(quick: bool) -> Backbone:
    torch.manual_seed(0)
    small = {**speed.DECODER, "output_token_lens": (96,), "num_sampling_steps": 4} if quick else {}
    return SundialBackbone(SundialForPrediction(SundialConfig(**small)))


@dataclass(frozen=True)
class Family:
    """One backbone and objective: probes to fit on, and shapes (context, channels, batch, rows) that are not among."""

    name: str
    backbone: Callable[[], Backbone]
    objective: str
    pieces: Sequence[tuple[int, int]]
    windows: Sequence[tuple[int, int, int]]
    shapes: Sequence[tuple[int, int, int, int]]


def families(quick: bool) -> list[Family]:
    timer = Family(
        "Timer 84M",
        lambda: speed.timer(quick, 2880),
        "reconstruction",
        [(2, 672), (8, 672), (2, 1440), (2, 2880), (8, 2880), (16, 1440)],
        [(1, 7, 672), (4, 7, 672), (1, 7, 2880), (2, 21, 1440), (1, 40, 672), (1, 64, 2880)],
        [(960, 3, 8, 12), (1920, 5, 4, 5), (2400, 12, 2, 8), (1152, 40, 1, 10)],
    )
    ttm = Family(
        "TTM R2",
        lambda: speed.ttm(quick),
        "reconstruction",
        [(8, 512), (64, 512), (192, 512), (384, 512)],
        [(1, 7, 512), (8, 7, 512), (32, 7, 512), (2, 40, 512), (4, 132, 512)],
        [(512, 3, 32, 96), (512, 21, 8, 84), (512, 60, 4, 120)],
    )
    others = [
        Family(
            "Fracast-0",
            lambda: load_backbone("fracast"),
            "reconstruction",
            [(2, 128), (16, 128), (2, 512), (16, 512)],
            [(1, 7, 128), (4, 7, 128), (1, 7, 512), (4, 7, 512), (2, 21, 512)],
            [(256, 7, 4, 14), (384, 12, 2, 8)],
        ),
        Family(
            "Sundial 128M, its own loss",
            lambda: sundial(quick),
            "paper",
            [(2, 480), (8, 480), (2, 960), (6, 960)],
            [(1, 3, 480), (4, 3, 480), (1, 7, 960), (2, 7, 960)],
            [(720, 3, 2, 3)],
        ),
    ]
    return [timer] if quick else [timer, ttm, *others]


def predictions(quick: bool) -> list[Row]:
    rows = []
    for family in families(quick):
        backbone = family.backbone()
        costs = probe_costs(
            lambda channels, objective=family.objective: adapter_for(channels, objective),  # type: ignore[misc]
            backbone,
            HORIZON,
            precision=precision_of(backbone),
            pieces=family.pieces[:4] if quick else family.pieces,
            windows=family.windows[:3] if quick else family.windows,
            clock=time.process_time,
        )
        for context, channels, batch, pairs in family.shapes[:1] if quick else family.shapes:
            adapter = adapter_for(channels, family.objective)
            shape = Shape(channels, batch, context, HORIZON)
            peak, seconds = measured(adapter, backbone, shape, batch, pairs)
            rows += compared(
                f"{family.name}, context {context}, C={channels}, B={batch}, {pairs} pairs at once",
                costs,
                adapter,
                shape,
                pairs,
                peak,
                seconds,
                quick,
            )
        print(f"{family.name} done", file=sys.stderr, flush=True)
    return rows


def compared(
    name: str,
    costs: Costs,
    adapter: DualWeaverAdapter,
    shape: Shape,
    pairs: int,
    peak: float,
    seconds: float,
    quick: bool,
) -> list[Row]:
    bytes_, expected = (
        costs.bytes(adapter, shape, shape.batch_size, pairs),
        costs.seconds(adapter, shape, shape.batch_size, pairs),
    )
    return [
        at_most(
            name,
            "predicted peak, relative error",
            abs(bytes_ / peak - 1),
            float("inf") if quick else 0.1,
            f"{bytes_ / 1e6:.1f} MB for {peak / 1e6:.1f}",
        ),
        at_most(
            name,
            "predicted time, relative error",
            abs(expected / seconds - 1),
            float("inf") if quick else 0.2,
            f"{expected:.3f} s for {seconds:.3f}",
        ),
    ]


def measured(
    adapter: DualWeaverAdapter, backbone: Backbone, shape: Shape, windows: int, pairs: int | None
) -> tuple[float, float]:
    """Peak and time of a step of the optimizer."""
    adapter.pairs_at_once = pairs
    step = TrainingStep(adapter, backbone, shape, micro_batch=windows)
    step()
    times = []
    for _ in range(ROUNDS):
        step.forget_gradients()
        times.append(seconds_of(step))
    return peak_of(step), statistics.median(times)
