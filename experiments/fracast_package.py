"""The package `fracast` with gradients: its own modules, which its public class runs under inference mode only."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import fracast
import torch
from fracast._core.model import build_from_cfg
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["native"]

WEIGHTS = Path(fracast.__file__).parent / "weights"


@cache
def _modules(window: int) -> tuple[Any, Any]:
    config = json.loads((WEIGHTS / "config.json").read_text())
    config["model"] |= {"W": window, "level_widths": [window]}
    core, head = build_from_cfg(config)
    state = load_file(WEIGHTS / "model.safetensors")
    for module, prefix in ((core, "core."), (head, "head.")):
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        module.load_state_dict(own)
    return core.requires_grad_(False).eval(), head.requires_grad_(False).eval()


def native(context: Tensor) -> Tensor:
    """`[series, window]` to `[series, 48, 9]`."""
    core, head = _modules(context.shape[1])
    low = context.amin(dim=1, keepdim=True)
    span = (context.amax(dim=1, keepdim=True) - low).clamp_min(1e-5)
    values = (context - low) / span
    mask = torch.ones_like(values, dtype=torch.bool)
    hidden = core(values[:, None], mask[:, None], mask[:, None])
    quantiles = head.forward_horizon(hidden, last_obs=values[:, -1:], ctx=values, ctx_mask=mask)
    return quantiles * span[..., None] + low[..., None]
