"""`make demo`: hourly weather of an airport, forecast with the embedded backbone, offline.

Fits on all but the last four weeks, scores those beside the untouched backbone, and forecasts what follows.
Writes forecast.csv and forecast.png.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from dualweaver import DualWeaver
from dualweaver.data.demo import load_demo
from dualweaver.data.files import write_aside, write_file
from dualweaver.evaluation.plots import plot_channels

HORIZON = 48
WINDOWS = 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    table = load_demo()
    held_out = HORIZON * WINDOWS
    print(f"{len(table)} hours x {table.shape[1]} channels; the last {held_out} hours are held out")
    started = time.perf_counter()
    model = DualWeaver(backbone="fracast", horizon=HORIZON, max_epochs=3, seed=arguments.seed)
    model.fit(table.iloc[:-held_out])
    print(f"fitted in {time.perf_counter() - started:.0f} s on {torch.get_num_threads()} threads")

    report = model.backtest(table, windows=WINDOWS)
    scores = report.table("mse")
    print(f"\nmean squared error on the held-out end, {WINDOWS} origins, in squared units of each channel")
    print(scores.to_string(formatters={"gain": "{:+.1%}".format}, float_format="{:.3f}".format))

    write_file(model.predict(table, quantiles=[0.1, 0.9]), arguments.output / "forecast.csv", index=True)
    figure = draw(model, report.forecasts, table)
    write_aside(arguments.output / "forecast.png", lambda aside: figure.savefig(aside, dpi=110))
    print(f"\nwrote {arguments.output / 'forecast.csv'} and {arguments.output / 'forecast.png'}")


def draw(model: DualWeaver, forecasts: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """The last held-out window: what came, both forecasts, and the 80 % band."""
    cutoff = forecasts["cutoff"].max()
    last = forecasts[forecasts["cutoff"] == cutoff]
    names = list(table.columns)
    frames = {name: last.pivot(index="ds", columns="unique_id", values=name)[names] for name in METHODS}  # noqa: PD010
    band = model.predict(table.loc[:cutoff], quantiles=[0.1, 0.9])
    edges = [band[[f"{name}_q{level}" for name in names]].set_axis(names, axis=1) for level in (0.1, 0.9)]
    return plot_channels(
        table.loc[:cutoff].iloc[-3 * HORIZON :],
        {"DualWeaver": frames["DualWeaver"], "zero-shot": frames["zero-shot"]},
        bands=[(edges[0], edges[1], "80 % band")],
        truth=frames["y"],
        title=f"Weather at JFK, {HORIZON} hours ahead from {cutoff:%d %B %Y, %H:%M}",
    )


METHODS = ("y", "DualWeaver", "zero-shot")


if __name__ == "__main__":
    main()
