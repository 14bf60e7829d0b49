"""How strongly each channel acts on each target inside the method: the Jacobian of what is woven into a series."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import jvp

from dualweaver.method.weaver import Weaver

__all__ = ["channel_influence", "spread_contexts"]

PROBES = 8


def channel_influence(weaver: Weaver, contexts: Tensor, *, seed: int = 0) -> Tensor:
    """Root mean square, over windows and steps, of the derivative of F (and the filter's edit) by a channel's values.

    The derivative of one step by all steps of a channel is a row; its norm is estimated with random signs (Hutchinson),
    exactly where a step depends on the same step only, as in `MLPFusion` without a filter.

    Args:
        weaver: fitted.
        contexts: scaled, `[batch, time, channel]`.
        seed: of the signs.

    Returns:
        `[target, channel]`, in scaled units a scaled unit.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (PROBES, *contexts.shape[:2]), generator=generator).to(contexts) * 2 - 1

    def woven(x: Tensor) -> Tensor:
        edit = 0 if weaver.context_filter is None else weaver.context_filter(x)
        return weaver.fusion(x) + edit

    columns = []
    for channel in range(contexts.shape[-1]):
        squares = torch.zeros(len(weaver.targets), dtype=contexts.dtype)
        for sign in signs:
            tangent = torch.zeros_like(contexts)
            tangent[..., channel] = sign
            squares += jvp(woven, (contexts,), (tangent,))[1].square().mean(dim=(0, 1)).detach()
        columns.append((squares / PROBES).sqrt())
    return torch.stack(columns, dim=-1)


def spread_contexts(values: npt.NDArray[np.float64], length: int, windows: int) -> list[npt.NDArray[np.float64]]:
    """At most so many stretches of `length` rows, evenly spread over `[time, channel]`, the last one included."""
    last = len(values) - length
    if last < 0:
        return []
    firsts = np.unique(np.linspace(last, 0, min(windows, last + 1)).astype(int))
    return [values[first : first + length] for first in firsts]
