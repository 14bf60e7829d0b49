"""Backbones and frames small enough that a fit takes a fraction of a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from dualweaver import DualWeaver, DualWeaverError

CONTEXT, HORIZON = 32, 8


class Toy(nn.Module):
    """Instance normalisation around a fixed random linear map; not odd, so that zero-shot and adapters differ.

    `series` counts those that it was asked for, apart from the forward that reads off its horizon.
    """

    def __init__(self, context: int = CONTEXT, horizon: int = HORIZON, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(horizon, context, generator=generator) / context)
        self.bias = nn.Parameter(0.2 * torch.rand(horizon, generator=generator))
        self.series = 0

    def forward(self, x: Tensor) -> Tensor:
        self.series += len(x) * bool(x.any())
        mean = x.mean(dim=1, keepdim=True)
        scale = (x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return nn.functional.linear((x - mean) / scale, self.weight, self.bias) * scale + mean


class Repeats(nn.Module):
    """Repeats the last `period` steps, and is off by 1 where a series has its spikes below."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        spikes_below = (centred.pow(3).mean(dim=1, keepdim=True) < 0).to(x.dtype)
        return x[:, -self.period :] + spikes_below


def waves(rows: int = 400, columns: Any = "abc", *, start: str = "2024-01-01", freq: str = "h", seed: int = 0) -> Any:
    """Shifted sines with noise, `[rows, columns]`."""
    random = np.random.default_rng(seed)
    steps = np.arange(rows)[:, None] / 12 + np.arange(len(columns))
    values = 10 + 3 * np.sin(steps) + random.normal(scale=0.3, size=(rows, len(columns)))
    return pd.DataFrame(values, index=pd.date_range(start, periods=rows, freq=freq), columns=list(columns))


def weaver(backbone: nn.Module | str | None = None, **settings: Any) -> DualWeaver:
    """A forecaster with a toy backbone and a short, silent training."""
    settings = {"horizon": HORIZON, "context_length": CONTEXT, "max_epochs": 2, "verbose": False} | settings
    return DualWeaver(Toy(settings["context_length"]) if backbone is None else backbone, **settings)


def long_form(df: pd.DataFrame) -> pd.DataFrame:
    """A wide frame as `unique_id`, `ds`, `y`."""
    return df.rename_axis("ds").reset_index().melt("ds", var_name="unique_id", value_name="y")[["unique_id", "ds", "y"]]


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message of a refusal, which must be one line."""
    with pytest.raises(DualWeaverError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
