"""How many windows a fit looks at, so that it takes minutes whatever the backbone and the number of channels.

The measure is the arithmetic of a forward pass, counted and not timed: the same table, backbone and settings always
give the same windows.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from dualweaver.backbones import Backbone
from dualweaver.compute.products import FLOP_FORMULAS

__all__ = ["epoch_windows", "forward_cost", "validation_windows"]

# Floating-point operations of the frozen model's forward pass in one epoch. On two cores about 20 s of training.
EPOCH_BUDGET = {"cpu": 9e11, "accelerator": 1e14}
MOST, USUAL, LEAST = 2048, 1024, 256  # training windows an epoch
OVERLAP = 8  # beyond the usual number, one window in so many
MOST_VALIDATION, LEAST_VALIDATION = 512, 128


def forward_cost(backbone: Backbone, context_length: int, horizon: int) -> float:
    """Floating-point operations of one series' forecast."""
    weights = next(backbone.parameters(), torch.zeros(()))
    context = torch.zeros(1, context_length, dtype=weights.dtype, device=weights.device)
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter, torch.no_grad():
        backbone(context, horizon)
    return float(counter.get_total_flops())


def epoch_windows(
    backbone: Backbone, context_length: int, horizon: int, series_per_window: int, available: int | None = None
) -> int:
    """Training windows an epoch, where the user does not say, of so many that there are.

    Long tables get more. Short ones do not: neighbours tell little new, and the best epoch is often an early one.
    """
    budget = EPOCH_BUDGET["accelerator" if torch.cuda.is_available() else "cpu"]
    cost = series_per_window * forward_cost(backbone, context_length, horizon)
    most = MOST if available is None else min(MOST, max(USUAL, available // OVERLAP))
    return most if most * cost <= budget else max(LEAST, int(budget / cost))


def validation_windows(epoch: int) -> int:
    """Validation windows beside so many training windows an epoch: enough to select and to calibrate by."""
    return min(MOST_VALIDATION, max(LEAST_VALIDATION, epoch // 2))
