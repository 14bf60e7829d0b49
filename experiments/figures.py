"""Tables and figures of the study, from the store alone; only the influence of channels is fitted here.

    python experiments/figures.py tables                    study.md, the tables of the study
    python experiments/figures.py gains                     gains.png: gain per channel and data set
    python experiments/figures.py influence ETTm1 ttm:path/to/weights      influence.png

A gain is the relative fall of the test error below zero-shot's on the same windows; over data sets, the mean of gains.
"""

from __future__ import annotations

from pathlib import Path

import benchmark
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import typer
from rows import Rows, noisy_channels

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.data.catalogue import load_dataset
from dualweaver.method.influence import channel_influence, spread_contexts

HERE = Path(__file__).parent
SETS = ["ETTh1", "ETTh2", "ETTm1", "ETTm2", "Weather", "Beijing12", "Exchange"]
WITHOUT_EXCHANGE = SETS[:-1]
METHODS = {
    "flip average, nothing trained": '{"ablate": "flip", "context_filter": false}',
    "AdaPTS": '{"adapter": "adapts"}',
    "paper's objective": '{"learning_rate": 0.01, "objective": "paper"}',
    "DualWeaver, no filter": '{"context_filter": false}',
    "DualWeaver, CNN": '{"fusion": "cnn"}',
    "DualWeaver (default)": "{}",
    "fine-tuned": '{"adapter": "fine-tune"}',
    "fine-tuned, paper's objective": '{"fine_tune": true, "learning_rate": 0.01, "objective": "paper"}',
    "fine-tuned, DualWeaver, CNN": '{"fine_tune": true, "fusion": "cnn"}',
    "fine-tuned, DualWeaver": '{"fine_tune": true}',
    "auto": '{"adapter": "auto"}',
}
ABLATIONS = {
    "default": "{}",
    "all of the filter's edit": '{"ablate": "whole"}',
    "no filter": '{"context_filter": false}',
    "no fusion (F = 0)": '{"ablate": "no-fusion"}',
    "neither": '{"ablate": "no-fusion", "context_filter": false}',
    "a = b = 1": '{"ablate": "equal-scales"}',
    "separate dropout masks": '{"ablate": "separate-dropout"}',
    "with the regulariser": '{"regularisation": 0.1}',
    "CNN": '{"fusion": "cnn"}',
}
PLACES = {"noise": "noise", "drop": "nothing"}  # what is there instead of some channels
CHANGE, ERROR, NOISY_GAIN = "change of the error, %", "standard error", "gain over zero-shot, %"
PAIRS = [
    ("DualWeaver (default)", "paper's objective"),
    ("DualWeaver (default)", "AdaPTS"),
    ("fine-tuned, DualWeaver", "fine-tuned"),
]

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


def store(path: Path = benchmark.STORE) -> pd.DataFrame:
    rows = pd.read_csv(path)
    for guard in ("", "unguarded_"):
        rows[f"{guard}gain"] = 100 * (1 - rows[f"test_{guard}mse"] / rows["test_zero_shot_mse"])
    rows["validation_gain"] = 100 * (1 - rows["val_mse"] / rows["val_zero_shot_mse"])
    return rows


def by_set(rows: pd.DataFrame, methods: dict[str, str], value: str) -> pd.DataFrame:
    """One row a method, one column a data set: seed means with their standard deviation, and the mean over sets."""
    lines = []
    for name, settings in methods.items():
        own = rows[(rows["settings"] == settings) & (rows["horizon"] == 96)].groupby("data")[value]
        mean, spread, seeds = own.mean(), own.std(), own.size()
        if not len(mean):
            continue
        cells = {
            data: ""
            if data not in mean
            else f"{mean[data]:.2f}" + (f" ± {spread[data]:.2f}" if seeds[data] > 1 else "")
            for data in SETS
        }
        whole = all(data in mean for data in WITHOUT_EXCHANGE)
        lines.append({"method": name, **cells, "six sets": f"{mean[WITHOUT_EXCHANGE].mean():.2f}" if whole else ""})
    return pd.DataFrame(lines)


def against(rows: pd.DataFrame) -> pd.DataFrame:
    """By how many per cent the seed mean of one method's test errors lies below that of another."""
    lines = []
    for ours, other in PAIRS:
        errors = [
            rows[(rows["settings"] == METHODS[name]) & (rows["horizon"] == 96)].groupby("data")["test_mse"].mean()
            for name in (ours, other)
        ]
        below = (100 * (1 - errors[0] / errors[1])).reindex(SETS)
        cells = {data: f"{below[data]:.2f}" for data in SETS}
        lines.append({"method": ours, "against": other, **cells, "six sets": f"{below[WITHOUT_EXCHANGE].mean():.2f}"})
    return pd.DataFrame(lines)


@app.command()
def tables() -> None:
    """Write study.md."""
    rows = store()
    zero = rows[rows["horizon"] == 96].groupby("data")[["test_zero_shot_mse", "test_stride"]].first().reindex(SETS)
    zero["test_stride"] = zero["test_stride"].astype("Int64")
    zero["seeds"] = rows[(rows["settings"] == "{}") & (rows["horizon"] == 96)].groupby("data").size()
    parts = [
        "# The study\n",
        "Gains in per cent over zero-shot, ± the standard deviation over seeds. What validation shows not to help "
        "falls back to zero-shot, channel by channel, whatever the method.\n",
        "## Zero-shot\n",
        benchmark.to_markdown(zero.reset_index()),
        "\n## Test gain\n",
        benchmark.to_markdown(by_set(rows, METHODS, "gain")),
        "\n## One method against another, test error\n",
        benchmark.to_markdown(against(rows)),
        "\n## Test gain without falling back\n",
        benchmark.to_markdown(by_set(rows, METHODS, "unguarded_gain")),
        "\n## Validation gain\n",
        benchmark.to_markdown(by_set(rows, METHODS, "validation_gain")),
        "\n## Ablations of the default, test gain\n",
        benchmark.to_markdown(by_set(rows[rows["seed"] == 0], ABLATIONS, "gain")),
        "\n## Further ahead, rolled forward from the adapter for 96 steps\n",
        benchmark.to_markdown(further(rows)),
        "\n## Noise or nothing in the place of channels: test error of the others, against the run with all\n",
        benchmark.to_markdown(noise(rows)),
    ]
    (HERE / "study.md").write_text("\n".join(parts) + "\n")


def further(rows: pd.DataFrame) -> pd.DataFrame:
    far = rows[rows["settings"].str.contains("fitted_horizon")].copy()
    far["settings"] = far["settings"].str.replace(r',? ?"fitted_horizon": 96', "", regex=True)
    names = {settings: name for name, settings in METHODS.items()}
    far["method"] = far["settings"].map(names)
    means = far.groupby(["data", "method", "horizon"])[["gain", "test_zero_shot_mse", "test_mse"]].mean()
    return means.reset_index()


def noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of the channels that every run has, against the same method without noise and against zero-shot.

    A run is compared with that of its own seed. Below the sets stand means over all but Exchange.
    """
    names, lines = {settings: name for name, settings in METHODS.items()}, []
    for _, row in rows[rows["settings"].str.contains('"noise"|"drop"')].iterrows():
        told = benchmark.json.loads(row["settings"])
        place, share = next((place, told.pop(key)) for key, place in PLACES.items() if key in told)
        settings = benchmark.json.dumps(told, sort_keys=True)
        same = (rows["settings"] == settings) & (rows["horizon"] == row["horizon"])
        same &= (rows["data"] == row["data"]) & (rows["seed"] == row["seed"])
        if not same.any():
            continue
        errors, clean_errors, gains = (
            np.array(text.split(), float)
            for text in (row["channel_mse"], rows[same]["channel_mse"].iloc[0], row["channel_gains"])
        )
        whole = len(clean_errors)
        kept = np.setdiff1d(np.arange(whole), noisy_channels(whole, 0.5, row["seed"]))
        if len(errors) == whole:  # else only those are there
            errors, gains = errors[kept], gains[kept]
        change = 100 * (errors.mean() / clean_errors[kept].mean() - 1)
        gain = 100 * (1 - errors.mean() / (errors / (1 - gains)).mean())
        lines.append((row["data"], names[settings], place, 100 * share, change, gain))
    what = ["method", "in their place", "channels, %"]
    runs = pd.DataFrame(lines, columns=["data", *what, CHANGE, NOISY_GAIN]).groupby(["data", *what])
    table = runs.mean().assign(**{ERROR: runs[CHANGE].sem(), "seeds": runs.size()}).reset_index()
    sets = table[table["data"].isin(WITHOUT_EXCHANGE)].groupby(what)
    means = sets[[CHANGE, NOISY_GAIN]].mean()
    means[ERROR] = sets[ERROR].agg(lambda errors: (errors**2).sum(skipna=False) ** 0.5 / len(errors))
    means["seeds"] = sets["seeds"].sum()
    means = means[sets.size() == len(WITHOUT_EXCHANGE)].reset_index()
    return pd.concat([table, means.assign(data="mean")])[["data", *what, CHANGE, ERROR, NOISY_GAIN, "seeds"]]


@app.command()
def gains() -> None:
    """Write gains.png."""
    rows = store()
    own = rows[(rows["settings"] == "{}") & (rows["horizon"] == 96) & (rows["seed"] == 0)].set_index("data")
    shown = [data for data in SETS if data in own.index]
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for place, data in enumerate(shown):
        values = 100 * np.array(own.loc[data, "channel_gains"].split(), float)
        spots = place + np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else [place]
        axes.bar(spots, np.sort(values)[::-1], width=0.6 / len(values))
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shown)), shown)
    axes.set_ylabel("fall of the test error below zero-shot's, %")
    axes.set_title("Gain of every channel (seed 0, horizon 96, frozen TTM-R2); 0: falls back")
    figure.savefig(HERE / "gains.png", dpi=130)


@app.command()
def influence(data: str, backbone: str) -> None:
    """Fit with seed 0, write influence.png."""
    pipeline = benchmark.fit(Rows(data), backbone, 96, {}).pipeline
    assert isinstance(pipeline.adapter, DualWeaverAdapter)
    frame = load_dataset(data)
    contexts = spread_contexts(frame.to_numpy(float), pipeline.context_length, 16)
    values = channel_influence(
        pipeline.adapter.weaver.eval(), torch.stack([pipeline.scale(context) for context in contexts])
    )
    figure, axes = plt.subplots(figsize=(5.5, 4.8), layout="constrained")
    image = axes.imshow(values, cmap="viridis")
    for labels, ticks in ((frame.columns, axes.set_xticks), (frame.columns, axes.set_yticks)):
        ticks(range(len(labels)), labels)
    axes.tick_params(axis="x", rotation=60)
    axes.set_xlabel("channel")
    axes.set_ylabel("target")
    figure.colorbar(image, label="standard deviations a standard deviation")
    axes.set_title(f"{data}: influence of channels inside the adapter")
    figure.savefig(HERE / "influence.png", dpi=130)


if __name__ == "__main__":
    app()
