"""Runs of the benchmark protocol and their table.

    python experiments/benchmark.py run ETTh1 --backbone ttm:path/to/weights --horizon 96 --seed 0
    python experiments/benchmark.py run ETTm1 --backbone ttm:path/to/weights --set adapter=zero-shot
    python experiments/benchmark.py table

A run fits `DualWeaver` on the train and validation rows of the published split (selection on validation only), scores
every test window once, and appends one row to the store, experiments/results.csv. A run that is in the store is not
repeated. Errors are in units of the train rows' standard deviation, as published ones are.
"""

from __future__ import annotations

import json
import resource
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import typer

from dualweaver import DualWeaver
from dualweaver.backbones import load_backbone
from dualweaver.calibration import edges_of, interpolate_levels
from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.files import write_file
from dualweaver.data.frames import Block
from dualweaver.data.splits import split_borders
from dualweaver.data.windows import WindowDataset
from dualweaver.fitting import fit_pipeline
from dualweaver.pipeline import Pipeline, context_spread
from dualweaver.settings import FitSettings

STORE = Path(__file__).parent / "results.csv"
KEYS = ["data", "backbone", "horizon", "settings", "seed", "test_stride"]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def run(
    data: str,
    backbone: str = "fracast",
    horizon: int = 96,
    seed: int = 0,
    change: Annotated[list[str] | None, typer.Option("--set", help="argument of DualWeaver, name=value")] = None,
    test_stride: int = 1,
    store: Path = STORE,
) -> None:
    """One row of the store."""
    settings = dict(_parsed(text) for text in change or [])
    label = backbone.split(":")[0]
    key = [describe_dataset(data).name, label, horizon, json.dumps(settings, sort_keys=True), seed, test_stride]
    rows = pd.read_csv(store) if store.exists() else pd.DataFrame(columns=KEYS)
    if (rows[KEYS].astype(str) == [str(part) for part in key]).all(axis=1).any():
        print("in the store already:", dict(zip(KEYS, key, strict=True)))
        return
    started = time.perf_counter()
    pipeline, scores, test = fit(data, backbone, horizon, seed, settings)
    fitted = time.perf_counter() - started
    row = dict(zip(KEYS, key, strict=True))
    row |= {"val_mse": scores["mse"].mean(), "val_zero_shot_mse": scores["zero_shot_mse"].mean()}
    row |= {"fallback": int(pipeline.fallback.sum()), "fit_seconds": round(fitted, 1)}
    row |= score(pipeline, test, test_stride)
    row |= {
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(),
        "revision": _revision(),
    }
    print(json.dumps(row, indent=1))
    rows = pd.read_csv(store) if store.exists() else rows  # another run may have finished meanwhile
    write_file(pd.concat([rows, pd.DataFrame([row])], ignore_index=True), store, index=False)


@app.command()
def table(store: Path = STORE) -> None:
    """The store as a markdown table: means over seeds."""
    rows = pd.read_csv(store)
    rows["gain"] = 1 - rows["test_mse"] / rows["test_zero_shot_mse"]
    shown = ["val_mse", "val_zero_shot_mse", "test_mse", "test_zero_shot_mse", "gain", "coverage_80", "fit_seconds"]
    means = rows.groupby(KEYS[:4], sort=False)[shown].mean().join(rows.groupby(KEYS[:4]).size().rename("seeds"))
    print("| " + " | ".join([*KEYS[:4], *means.columns]) + " |")
    print("|" + "---|" * (4 + len(means.columns)))
    for row in means.reset_index().to_dict(orient="records"):
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        print("| " + " | ".join(cells) + " |")


def fit(
    data: str, backbone: str, horizon: int, seed: int, settings: dict[str, Any]
) -> tuple[Pipeline, pd.DataFrame, WindowDataset]:
    """A pipeline fitted on the published train and validation rows, its validation scores, and the test windows."""
    frame, info = load_dataset(data), describe_dataset(data)
    # a gap has no truth to score: filled as `DualWeaver.fit` would
    values = frame.interpolate(limit_direction="both").to_numpy(float)
    splits = split_borders(len(values), info.split)
    known = values[: splits.validation.stop]
    model = DualWeaver(backbone, horizon, seed=seed, validation_size=len(splits.validation), **settings)
    block = Block(None, pd.RangeIndex(len(known)), known, np.ones(known.shape, dtype=bool))
    loaded = load_backbone(backbone, context_length=model.context_length)
    fitted = fit_pipeline(loaded, [block], list(range(values.shape[1])), FitSettings.checked(model))
    first = splits.test.start - fitted.pipeline.context_length
    scaled = fitted.pipeline.scale(values[first : splits.test.stop])
    length = fitted.pipeline.context_length + horizon
    return fitted.pipeline, fitted.scores, WindowDataset(scaled, np.arange(len(scaled) - length + 1), length)


def score(pipeline: Pipeline, windows: WindowDataset, stride: int) -> dict[str, float]:
    """Errors on the test windows of the fitted forecaster and of zero-shot, and the coverage of the 80 % interval."""
    context, plain, lower_upper = pipeline.context_length, pipeline.zero_shot(), edges_of(80)
    sums: dict[str, float] = dict.fromkeys(
        ("test_mse", "test_mae", "test_zero_shot_mse", "test_zero_shot_mae", "coverage_80"), 0.0
    )
    if pipeline.backbone.quantile_levels:
        sums["coverage_80_uncalibrated"] = 0.0  # of the backbone's own quantiles, through the symmetric rule
    positions = torch.arange(0, len(windows), stride)
    for chunk in positions.split(64):
        batch = windows.__getitems__(chunk.tolist())
        truth = batch[:, context:].double()
        forecast = pipeline.forecast_scaled(batch[:, :context], truth.shape[1])
        for name, mean in (
            ("", forecast.mean),
            ("zero_shot_", plain.forecast_scaled(batch[:, :context], truth.shape[1]).mean),
        ):
            error = mean.double() - truth
            sums[f"test_{name}mse"] += float(error.square().mean()) * len(batch)
            sums[f"test_{name}mae"] += float(error.abs().mean()) * len(batch)
        assert pipeline.calibration is not None
        base = None if forecast.quantiles is None else forecast.quantiles.double().numpy()
        spread = context_spread(batch[:, :context], pipeline.targets)
        centre = forecast.mean.double().numpy()
        edges = pipeline.calibration.apply(centre, base, forecast.levels, lower_upper, spread)
        sums["coverage_80"] += _inside(edges, truth) * len(batch)
        if base is not None:
            own = interpolate_levels(base, forecast.levels, lower_upper)
            sums["coverage_80_uncalibrated"] += _inside(own, truth) * len(batch)
    return {name: value / len(positions) for name, value in sums.items()}


def _inside(edges: npt.NDArray[np.float64], truth: torch.Tensor) -> float:
    """Share of the truth `[window, step, channel]` between both edges `[window, step, channel, 2]`."""
    return float(((edges[..., 0] <= truth.numpy()) & (truth.numpy() <= edges[..., 1])).mean())


def _parsed(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _revision() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=STORE.parent
    )
    return described.stdout.strip()


if __name__ == "__main__":
    app()
