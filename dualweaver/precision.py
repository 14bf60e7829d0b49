"""The number format of a frozen model's weights.

bfloat16 products are several times as fast as float32 ones where the processor or GPU has instructions for them, and
weights and activations take half the memory. What is around the model (statistics, losses, reconstruction and all that
is trained) stays in float32.
"""

from __future__ import annotations

import copy
import time
from functools import lru_cache

import torch
from torch import nn

from dualweaver.backbones import Backbone, load_backbone
from dualweaver.backbones.products import product

__all__ = ["PRECISIONS", "load_in_precision", "precision_of"]

PRECISIONS = ("32", "bf16", "auto")
WORTH = 1.5  # times as fast a product must be; the rest of a model gains less
SIZE = 1024  # of the products that are timed: those of Timer and Sundial


def load_in_precision(backbone: str | nn.Module, precision: str, context_length: int | None = None) -> Backbone:
    """`load_backbone`, with weights in another precision where that is asked for.

    Args:
        backbone, context_length: as for `load_backbone`. An object is copied before it is cast.
        precision: "32": the weights as they come. "bf16". "auto": bfloat16 where it pays, that is for backbones made of
            large products (`Backbone.large_products`) on a device where a short measurement, made once a process, finds
            such products faster.
    """
    loaded = load_backbone(backbone, context_length=context_length)
    weights = next(loaded.parameters(), torch.zeros(()))
    if precision == "auto":
        single = weights.dtype == torch.float32
        precision = "bf16" if single and loaded.large_products and _bf16_pays(weights.device.type) else "32"
    if precision == "32" or weights.dtype == torch.bfloat16:
        return loaded
    return (copy.deepcopy(loaded) if isinstance(backbone, nn.Module) else loaded).to(torch.bfloat16)


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
