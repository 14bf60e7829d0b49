"""Runs of the benchmark protocol, their store, table and figure.

    python experiments/benchmark.py run ETTh1 --backbone ttm:path/to/weights --horizon 96 --seed 0
    python experiments/benchmark.py run ETTm1 --backbone ttm:path/to/weights --set adapter=adapts
    python experiments/benchmark.py run ETTm1 --backbone ttm:path/to/weights --ablate no-fusion
    python experiments/benchmark.py --quick --weights path/to/weights      one row of the store again, in minutes
    python experiments/benchmark.py table

A run fits `DualWeaver` on the train and validation rows of the published split (selection on validation only), scores
every test window once, and appends to the store, experiments/results.csv. With `adapter=auto` each
candidate is a row, and what validation chose is one more. A run that is in the store is not repeated. Errors are in
units of the train rows' standard deviation, as published ones are.

`--develop` moves all splits one part back: what the published protocol calls validation rows is scored, and the rows
before them train and select. Test rows are not read; this is where variants of the method are compared.

`--ahead` forecasts further than the horizon that was fitted, rolled forward.
"""

from __future__ import annotations

import fcntl
import json
import resource
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import ablations
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import typer
from rows import Rows

from dualweaver import DualWeaver
from dualweaver.backbones import load_backbone
from dualweaver.data.catalogue import describe_dataset
from dualweaver.data.files import write_file
from dualweaver.data.windows import WindowDataset
from dualweaver.fit.fitting import Candidate, Fitted, fit_pipeline
from dualweaver.forecast.calibration import edges_of, interpolate_levels
from dualweaver.forecast.pipeline import Pipeline, context_spread, mix_targets
from dualweaver.settings import AUTO, FitSettings, Options

STORE = Path(__file__).parent / "results.csv"
KEYS = ["data", "backbone", "horizon", "settings", "seed", "test_stride"]
QUICK: dict[str, Any] = {"data": "ETTh2", "backbone": "ttm", "horizon": 96, "settings": "{}", "test_stride": 1}

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def run(
    data: str,
    backbone: str = "fracast",
    horizon: int = 96,
    seed: int = 0,
    change: Annotated[list[str] | None, typer.Option("--set", help="argument of DualWeaver, name=value")] = None,
    ablate: Annotated[str | None, typer.Option(help=", ".join([ablations.FLIP, *ablations.ABLATIONS]))] = None,
    noise: Annotated[float, typer.Option(help="share of the channels that noise replaces, train and test")] = 0.0,
    drop: Annotated[
        float, typer.Option(help="share of the channels to leave out, those that noise would replace")
    ] = 0.0,
    ahead: Annotated[list[int] | None, typer.Option(help="steps to score, as fitted by default")] = None,
    develop: Annotated[bool, typer.Option(help="score validation rows, and fit on those before")] = False,
    default_known: Annotated[
        bool, typer.Option("--default-known", help="take auto's first candidate from the store")
    ] = False,
    test_stride: int = 1,
    store: Path = STORE,
) -> None:
    """One row of the store a step count ahead (and candidate, with adapter=auto)."""
    settings = dict(_parsed(text) for text in change or [])
    seen = {"ablate": ablate, "noise": noise, "drop": drop, "develop": develop}
    told = settings | {name: value for name, value in seen.items() if value}
    keys = {"data": describe_dataset(data).name, "backbone": backbone.split(":")[0], "seed": seed}
    keys |= {"test_stride": test_stride}

    def key(told: dict[str, Any], steps: int) -> dict[str, Any]:
        told = told | ({} if steps == horizon else {"fitted_horizon": horizon})
        return {**keys, "horizon": steps, "settings": json.dumps(told, sort_keys=True)}

    ahead = ahead or [horizon]
    default = {name: value for name, value in told.items() if name != "adapter"}
    known = {steps: _row(store, key(default, steps)) for steps in ahead} if default_known else {}
    if default_known and settings.get("adapter") != AUTO:
        raise typer.BadParameter("several candidates come only of --set adapter=auto", param_hint="--default-known")
    if None in known.values():
        raise typer.BadParameter(
            "the store has no row of the default for this data, seed and stride", param_hint="store"
        )
    if all(_row(store, key(told, steps)) for steps in ahead):
        print("in the store already:", keys, told)
        return
    started = time.perf_counter()
    rows = Rows(data, seed, noise, drop, develop)
    fitted = fit(rows, backbone, horizon, settings, ablate, default_known)
    seconds = round(time.perf_counter() - started, 1)
    for steps in ahead:
        test = rows.to_score(fitted.pipeline, steps)
        scored = {id(candidate): score(candidate.pipeline, test, test_stride) for candidate in fitted.candidates}
        for name, candidate in _named_candidates(fitted, told):
            row = {
                **key(name, steps),
                **_selection(candidate, fitted),
                "fit_seconds": seconds,
                **scored[id(candidate)],
                **_here(),
            }
            first = known.get(steps)
            if first and name is told and first["val_mse"] <= row["val_mse"]:  # its first candidate was not fitted here
                row = {**first, "settings": row["settings"]}
            print(json.dumps(row, indent=1))
            _append(row, store)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    quick: Annotated[bool, typer.Option(help="one row of the store again, in minutes")] = False,
    weights: Annotated[str, typer.Option(envvar="DUALWEAVER_TTM", help="folder of TTM R2; the hub if empty")] = "",
) -> None:
    """Does a run made here lie within the spread of the store's seeds?"""
    if not quick:
        if context.invoked_subcommand is None:
            print(context.get_help())
        return
    stored, rows = pd.read_csv(STORE), Rows(QUICK["data"])
    known = stored[(stored[list(QUICK)] == pd.Series(QUICK)).all(axis=1)]["test_mse"]
    fitted = fit(rows, f"ttm:{weights}" if weights else "ttm", QUICK["horizon"], {})
    value = score(fitted.pipeline, rows.to_score(fitted.pipeline, QUICK["horizon"]), 1)["test_mse"]
    print(f"{QUICK}: test MSE {value:.4f}; in the store {known.min():.4f} to {known.max():.4f}, {len(known)} seeds")
    margin = max(float(known.sem()), 1e-4)  # another machine rounds otherwise
    if not known.min() - margin <= value <= known.max() + margin:
        raise typer.Exit(1)


@app.command()
def table(store: Path = STORE) -> None:
    """The store as a markdown table: means over seeds."""
    rows = pd.read_csv(store)
    rows["gain"] = 1 - rows["test_mse"] / rows["test_zero_shot_mse"]
    shown = ["val_mse", "val_zero_shot_mse", "test_mse", "test_zero_shot_mse", "gain", "coverage_80", "fit_seconds"]
    by = ["data", "backbone", "horizon", "settings"]
    means = rows.groupby(by, sort=False)[shown].mean().join(rows.groupby(by).size().rename("seeds"))
    print(to_markdown(means.reset_index()))


def to_markdown(frame: pd.DataFrame) -> str:
    """A markdown table of a frame without its index."""
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|" + "---|" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "" if np.isnan(value) else f"{value:.4g}"


def fit(
    rows: Rows,
    backbone: str,
    horizon: int,
    settings: dict[str, Any],
    ablate: str | None = None,
    default_known: bool = False,
) -> Fitted:
    """What a fit on the train and validation rows gives."""
    size = len(rows.splits.validation)
    model = DualWeaver(backbone, horizon, seed=rows.seed, validation_size=size, verbose=False, **settings)
    loaded = load_backbone(backbone, context_length=model.context_length)
    checked = ablations.ablated((_LaterCandidates if default_known else FitSettings).checked(model), ablate)
    return fit_pipeline(loaded, [rows.known()], list(range(rows.values.shape[1])), checked)


def score(pipeline: Pipeline, windows: WindowDataset, stride: int) -> dict[str, float]:
    """Errors on the test windows, and the coverage of the 80 % interval.

    Errors of the fitted forecaster, of the same without falling back to zero-shot, and of zero-shot.
    """
    context, plain, lower_upper = pipeline.context_length, pipeline.zero_shot(), edges_of(80)
    adapted, rows = pipeline.without_fallback(), np.flatnonzero(pipeline.fallback)
    sums: dict[str, float] = {}
    channels: dict[str, npt.NDArray[np.float64]] = {}

    def add(name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + value

    positions = torch.arange(0, len(windows), stride)
    for chunk in positions.split(64):
        batch = windows.__getitems__(chunk.tolist())
        truth = batch[:, context:].double()
        untouched = plain.forecast_scaled(batch[:, :context], truth.shape[1])
        raw = adapted.forecast_scaled(batch[:, :context], truth.shape[1])
        for name, mean in (("unguarded_", raw.mean), ("zero_shot_", untouched.mean)):
            add(f"test_{name}mse", float((mean - truth).square().mean()) * len(batch))
            add(f"test_{name}mae", float((mean - truth).abs().mean()) * len(batch))
        forecast = mix_targets(raw, untouched, rows) if len(rows) else raw
        add("test_mse", float((forecast.mean - truth).square().mean()) * len(batch))
        add("test_mae", float((forecast.mean - truth).abs().mean()) * len(batch))
        for name, mean in (("mse", forecast.mean), ("zero_shot_mse", untouched.mean)):
            error = (mean - truth).square().mean(dim=(0, 1)).numpy() * len(batch)
            channels[name] = channels.get(name, 0.0) + error
        assert pipeline.calibration is not None
        base = None if forecast.quantiles is None else forecast.quantiles.double().numpy()
        spread = context_spread(batch[:, :context], pipeline.targets)
        centre = forecast.mean.double().numpy()
        edges = pipeline.calibration.apply(centre, base, forecast.levels, lower_upper, spread)
        add("coverage_80", _inside(edges, truth) * len(batch))
        if base is not None:
            own = interpolate_levels(base, forecast.levels, lower_upper)
            add("coverage_80_uncalibrated", _inside(own, truth) * len(batch))
    scores: dict[str, Any] = {name: value / len(positions) for name, value in sums.items()}
    gains = 1 - channels["mse"] / channels["zero_shot_mse"]
    scores["channel_gains"] = " ".join(f"{gain:.4f}" for gain in gains)
    scores["channel_mse"] = " ".join(f"{value:.5g}" for value in channels["mse"] / len(positions))
    return scores


def _named_candidates(fitted: Fitted, told: dict[str, Any]) -> list[tuple[dict[str, Any], Candidate]]:
    """What validation chose, under the settings of the run, and each candidate of "auto" under its own."""
    named = [(told, fitted.chosen)]
    if told.get("adapter") == AUTO:
        rest = {name: value for name, value in told.items() if name != "adapter"}
        named += [({**rest, **_differs(candidate.settings)}, candidate) for candidate in fitted.candidates]
    return named


def _differs(settings: FitSettings) -> dict[str, Any]:
    """In what a candidate of "auto" differs from the default."""
    adapter = {} if settings.adapter == Options.adapter else {"adapter": settings.adapter}
    return adapter | ({"fine_tune": True} if settings.fine_tune else {})


def _selection(candidate: Candidate, fitted: Fitted) -> dict[str, Any]:
    """How a candidate did on validation, and with which share of a filter's edit it forecasts."""
    weaver = getattr(candidate.pipeline.adapter, "weaver", None)
    edit = None if weaver is None else weaver.context_filter
    return {
        "val_mse": candidate.error.mean(),
        "val_zero_shot_mse": fitted.scores["zero_shot_mse"].mean(),
        "fallback": int(candidate.pipeline.fallback.sum()),
        "forecaster": candidate.settings.adapter + (" (fine-tuned)" if candidate.settings.trains_backbone else ""),
        "share": None if edit is None else float(edit.strength),
    }


def _here() -> dict[str, Any]:
    """By what and with how much a run was made."""
    return {
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(),
        "revision": _revision(),
    }


class _LaterCandidates(FitSettings):
    """The candidates of "auto" without the default, which has a row already."""

    def candidates(self, multivariate: bool = False) -> list[FitSettings]:
        return [one for one in super().candidates(multivariate) if _differs(one)]


def _row(store: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """What the store says of a run."""
    rows = pd.read_csv(store) if store.exists() else pd.DataFrame(columns=KEYS)
    found = rows[(rows[KEYS].astype(str) == [str(key[name]) for name in KEYS]).all(axis=1)]
    return None if found.empty else found.iloc[0].to_dict()


def _append(row: dict[str, Any], store: Path) -> None:
    """Add a row in the place of an earlier one of the same run; another run may have finished meanwhile."""
    with LockedFile(store.with_suffix(".lock")):
        fresh = pd.DataFrame([row])
        if store.exists():
            rows = pd.read_csv(store)
            same = (rows[KEYS].astype(str) == [str(row[name]) for name in KEYS]).all(axis=1)
            fresh = pd.concat([rows[~same], fresh], ignore_index=True)
        write_file(fresh, store, index=False)


def _inside(edges: npt.NDArray[np.float64], truth: torch.Tensor) -> float:
    """Share of the truth `[window, step, channel]` between both edges `[window, step, channel, 2]`."""
    return float(((edges[..., 0] <= truth.numpy()) & (truth.numpy() <= edges[..., 1])).mean())


class LockedFile:
    """Waits until no other process holds the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self.file.close()


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
