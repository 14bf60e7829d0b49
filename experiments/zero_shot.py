"""Zero-shot errors of the small backbones side by side: 512 steps of context, 96 ahead.

    python experiments/zero_shot.py --ttm path/to/weights                test rows, every 29th window
    python experiments/zero_shot.py --ttm path/to/weights --split val    validation rows, for development

Errors are in units of the train rows' standard deviation, the splits are the published ones, and all backbones see the
same windows. Speed is taken on one thread in the same run: a series of 512 steps forward, and forward and backward
with the gradient to the series.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from benchmark import to_markdown

from dualweaver.backbones import Backbone, load_backbone
from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.splits import protocol_segments
from dualweaver.data.windows import WindowDataset

SETS = ["ETTh1", "ETTh2", "ETTm1", "ETTm2", "weather", "exchange"]
CONTEXT, HORIZON, BATCH = 512, 96, 128


def main(
    ttm: Annotated[str, typer.Option(help="folder of TTM R2; left out if empty")] = "",
    loom: Annotated[str, typer.Option(help="folder of other Loom weights")] = "",
    split: Annotated[str, typer.Option(help="test, or val for development")] = "test",
    stride: Annotated[int, typer.Option(help="score every so many windows; no divisor of a day")] = 29,
    only: Annotated[list[str] | None, typer.Option(help="of fracast, loom, ttm")] = None,
    out: Annotated[Path | None, typer.Option(help="write the rows here as CSV")] = None,
) -> None:
    """Print one row a backbone and data set, then one a backbone."""
    torch.set_num_threads(1)
    names = {"fracast": "fracast", "loom": f"loom:{loom}" if loom else "loom"} | ({"ttm": f"ttm:{ttm}"} if ttm else {})
    backbones = {name: load_backbone(spec) for name, spec in names.items() if name in (only or names)}
    rows = []
    for data in SETS:
        windows = cut(data, split, stride)
        for name, backbone in backbones.items():
            rows.append({"data": data, "backbone": name, "windows": len(windows), **score(backbone, windows)})
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    if out:
        table.round(5).to_csv(out, index=False)
    means = table.groupby("backbone", sort=False)[["mse", "mae", "coverage_80"]].mean().reset_index()
    costs = pd.DataFrame([{"backbone": name, **speed(backbone)} for name, backbone in backbones.items()])
    means = means.merge(costs, on="backbone")
    if "fracast" in backbones:
        first = means[means["backbone"] == "fracast"].iloc[0]
        for column in ("mse", "both_ms"):
            means[f"{column}_to_fracast"] = means[column] / first[column]
    print(to_markdown(table.pivot_table("mse", "data", "backbone", sort=False).reset_index()))
    print(to_markdown(means))


def cut(data: str, split: str, stride: int) -> WindowDataset:
    """Windows of the validation or test rows, scaled by the train rows."""
    frame = load_dataset(data).interpolate(limit_direction="both")
    segments = protocol_segments(frame, describe_dataset(data).split, CONTEXT)
    values = torch.as_tensor(segments.test if split == "test" else segments.validation, dtype=torch.float32)
    length = CONTEXT + HORIZON
    return WindowDataset(values, np.arange(0, len(values) - length + 1, stride), length)


def score(backbone: Backbone, windows: WindowDataset) -> dict[str, float]:
    """Errors of the point forecast, and how often the truth lies between the levels 0.1 and 0.9."""
    squared = absolute = inside = 0.0
    for chunk in torch.arange(len(windows)).split(32):
        batch = windows.__getitems__(chunk.tolist()).transpose(1, 2).flatten(0, 1)
        truth, forecast = batch[:, CONTEXT:], backbone.forecast(batch[:, :CONTEXT], HORIZON)
        share = len(chunk) / len(windows)
        squared += float((forecast.mean - truth).square().mean()) * share
        absolute += float((forecast.mean - truth).abs().mean()) * share
        if forecast.quantiles is None:
            inside = float("nan")
            continue
        low, high = (forecast.quantiles[..., forecast.levels.index(level)] for level in (0.1, 0.9))
        inside += float(((low <= truth) & (truth <= high)).float().mean()) * share
    return {"mse": squared, "mae": absolute, "coverage_80": inside}


def speed(backbone: Backbone) -> dict[str, float]:
    """Parameters, and milliseconds a series, the best of five calls after one that warms up."""
    context = torch.randn(BATCH, CONTEXT, generator=torch.Generator().manual_seed(0))
    asked = context.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            backbone(context, HORIZON)

    def both() -> None:
        torch.autograd.grad(backbone(asked, HORIZON).sum(), asked)

    return {
        "parameters": sum(weights.numel() for weights in backbone.parameters()),
        "forward_ms": _best(forward) / BATCH * 1000,
        "both_ms": _best(both) / BATCH * 1000,
    }


def _best(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


if __name__ == "__main__":
    typer.run(main)
