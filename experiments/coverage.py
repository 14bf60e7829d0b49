"""Coverage of a backbone's own 80 % interval on test windows, through the symmetric quantile rule, without training.

    python experiments/coverage.py ETTh1 ETTm1 Weather Beijing12 --windows 24

The untrained surrogates are x and -x (F = 0, a = b = 1): the rule pairs the 0.1 quantile of one with the 0.9 quantile
of the other. Beside it the same quantiles straight from the untouched backbone. Calibrated coverage is in results.csv.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
import typer

from dualweaver.adapters import DualWeaverAdapter, ZeroShot
from dualweaver.backbones import load_backbone
from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.splits import protocol_segments
from dualweaver.data.windows import WindowDataset
from dualweaver.forecast.pipeline import forecast_windows


def main(
    data: list[str],
    backbone: str = "fracast",
    horizon: int = 96,
    windows: Annotated[int, typer.Option(help="test windows of each data set, evenly spaced")] = 24,
) -> None:
    model = load_backbone(backbone)
    context = model.context_length
    print("| data | windows | symmetric rule | untouched |\n|---|---|---|---|")
    for name in data:
        frame = load_dataset(name).interpolate(limit_direction="both")
        test = protocol_segments(frame, describe_dataset(name).split, context).test
        starts = np.linspace(0, len(test) - context - horizon, windows).astype(int)
        chosen = WindowDataset(torch.as_tensor(test, dtype=torch.float32), starts, context + horizon)
        channels = range(test.shape[1])
        shares = []
        for adapter in (DualWeaverAdapter(len(channels), channels), ZeroShot(len(channels), channels)):
            forecast, truth = forecast_windows(adapter, model, chosen, context)
            assert forecast.quantiles is not None
            lower, upper = (forecast.quantiles[..., forecast.levels.index(level)] for level in (0.1, 0.9))
            shares.append(float(((lower <= truth) & (truth <= upper)).double().mean()))
        print(f"| {name} | {windows} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
