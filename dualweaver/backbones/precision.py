"""The number format of a frozen model's weights.

bfloat16 products are several times as fast as float32 ones where the processor or GPU has instructions for them, and
weights and activations take half the memory. What is around the model (statistics, losses, reconstruction and all that
is trained) stays in float32.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from dualweaver.backbones import Backbone, load_backbone
from dualweaver.compute.products import product
from dualweaver.notices import notify

__all__ = ["choose_precision", "load_in_precision", "precision_of"]

WORTH = 1.5  # times as fast a product must be; the rest of a model gains less
SIZE = 1024  # of the products that are timed: those of Timer and Sundial
TOLERANCE = 1e-3  # of the validation error of float32, by which that of bfloat16 may differ


def load_in_precision(backbone: str | nn.Module, precision: str, context_length: int | None = None) -> Backbone:
    """`load_backbone`, with weights in another precision where that is asked for.

    Args:
        backbone, context_length: as for `load_backbone`. An object is copied before it is cast.
        precision: "32": the weights as they come. "bf16". "auto": as they come, until `choose_precision` has seen data.
    """
    loaded = load_backbone(backbone, context_length=context_length)
    weights = next(loaded.parameters(), torch.zeros(()))
    if precision != "bf16" or weights.dtype == torch.bfloat16:
        return loaded
    return (copy.deepcopy(loaded) if isinstance(backbone, nn.Module) else loaded).to(torch.bfloat16)


def choose_precision(backbone: Backbone, error: Callable[[Backbone], float]) -> Backbone:
    """What "auto" means: a copy in bfloat16 where that is faster and as accurate, the backbone itself otherwise.

    Faster: the backbone is made of large products (`Backbone.large_products`), which a short measurement, made once a
    process, finds faster on its device. As accurate: `error` is that of float32 to within 0.1 %.

    Args:
        backbone: frozen.
        error: of its zero-shot forecasts on validation windows.
    """
    weights = next(backbone.parameters(), torch.zeros(()))
    if weights.dtype != torch.float32 or not backbone.large_products or not _bf16_pays(weights.device.type):
        return backbone
    half = copy.deepcopy(backbone).to(torch.bfloat16)
    exact, rounded = error(backbone), error(half)
    if abs(rounded - exact) <= TOLERANCE * exact:
        return half
    notify(
        f"precision='auto': the validation error of the {backbone.name!r} backbone is {rounded:.6g} in bfloat16 and "
        f"{exact:.6g} in float32, which is kept"
    )
    return backbone


def precision_of(backbone: Backbone) -> str:
    """What `load_in_precision` takes to make the same weights again."""
    return "bf16" if next(backbone.parameters(), torch.zeros(())).dtype == torch.bfloat16 else "32"


@lru_cache
def _bf16_pays(device: str) -> bool:
    """Whether a product is `WORTH` times as fast in bfloat16 as in float32, both at their best of a few."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.ones(SIZE, SIZE, dtype=dtype, device=device) for _ in range(2))
        times = []
        for _ in range(6):
            start = time.perf_counter()
            float(product(left, right)[0, 0])  # waits for a device
            times.append(time.perf_counter() - start)
        best[dtype] = min(times)
    return best[torch.float32] > WORTH * best[torch.bfloat16]
