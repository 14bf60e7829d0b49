"""Short fits of a small backbone, and the names of the stages that they go through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from dualweaver import DualWeaver
from dualweaver.fit import stages
from dualweaver.fit.stages import TUNED_SHARES
from dualweaver.method import FILTER_SHARES

CONTEXT, HORIZON = 12, 4

TRIALS = [f"fine-tune: trial of {rate:g}" for rate in stages.FINE_TUNING_RATES]
WOVEN, TUNED_WOVEN = (
    ["dualweaver", *(f"dualweaver: share {share:g}" for share in shares)] for shares in (FILTER_SHARES, TUNED_SHARES)
)


def frame(rows: int = 260) -> pd.DataFrame:
    steps = np.arange(rows)[:, None] / 4 + np.arange(3)
    values = np.sin(steps) + np.random.default_rng(0).normal(0, 0.1, (rows, 3))
    return pd.DataFrame(values, columns=list("abc"), index=pd.date_range("2024", periods=rows, freq="h"))


def fitted(backbone: nn.Module, **settings: Any) -> DualWeaver:
    common = {"context_length": CONTEXT, "max_epochs": 2, "verbose": False}
    return DualWeaver(backbone, HORIZON, **{**common, **settings}).fit(frame())


def stage_names(model: DualWeaver) -> list[str]:
    return list(dict.fromkeys(model.history_["stage"]))
