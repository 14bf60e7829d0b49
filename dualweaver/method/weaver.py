"""The method: two symmetric surrogate series per channel, and the forecast rebuilt from their difference.

Source: DualWeaver, arXiv 2602.22066, section 3. A fusion module F mixes the channels of a window x. Two surrogates

    s1 = a * x + F(x)        s2 = -b * x + F(x)        (a, b > 0, one value per channel)

go through a frozen univariate forecaster f, and the forecast is y = (f(s1) - f(s2)) / (a + b): whatever F adds to make
the surrogates easier to forecast is subtracted again, so no decoder is needed.

For a model that is odd and scale-equivariant, as those that normalise their context nearly are, that cancellation goes
far: to first order in F the forecast does not change at all. What F cannot do, a filter of the context can: in our
default x is replaced by e(x) = x + G(x) above, where G starts at zero and F still cancels. See `ContextFilter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dualweaver.method.context_filter import ContextFilter
from dualweaver.method.fusion import FUSION_LIMIT

__all__ = ["Weaver", "surrogate_bound"]

SCALE_FLOOR = 1e-2  # a and b stay at or above this, so that a + b never comes near zero


class Weaver(nn.Module):
    """Surrogates and reconstruction, with the trainable parts a, b, F and, where there is one, the filter G.

    Args:
        fusion: F, maps `[batch, time, channel]` to `[batch, time, target]`.
        targets: positions of the channels to forecast; the others feed fusion and filter only.
        context_filter: G, likewise; None in the published method.
    """

    def __init__(self, fusion: nn.Module, targets: Sequence[int], context_filter: ContextFilter | None = None) -> None:
        super().__init__()
        self.fusion = fusion
        self.context_filter = context_filter
        self.a = nn.Parameter(torch.ones(len(targets)))
        self.b = nn.Parameter(torch.ones(len(targets)))
        self.register_buffer("targets", torch.as_tensor(list(targets), dtype=torch.long), persistent=False)

    targets: Tensor

    def surrogates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, time, channel]` to two of `[batch, time, target]`.

        F is evaluated once, so that both surrogates carry the same dropout mask and F cancels in training too.
        """
        return self._around(x, x.index_select(-1, self.targets))

    def context_surrogates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a context, which is filtered first."""
        if self.context_filter is None:
            return self.surrogates(x)
        return self._around(x, x.index_select(-1, self.targets) + self.context_filter(x))

    def _around(self, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fusion(x.clamp(-FUSION_LIMIT, FUSION_LIMIT))
        return self.a * own + fused, fused - self.b * own

    def reconstruct(self, first: Tensor, second: Tensor) -> Tensor:
        """The forecast from those of both surrogates, `[batch, horizon, target]` each."""
        return (first - second) / (self.a + self.b)

    def reconstruct_quantiles(self, first: Tensor, second: Tensor) -> Tensor:
        """Quantiles of the forecast from those of both surrogates, `[batch, horizon, target, level]` each.

        The second surrogate carries -x, so its quantiles pair in reverse: tau of the first with 1 - tau of the second.
        The levels must be symmetric around one half. Sorted along the levels.
        """
        scale = (self.a + self.b).unsqueeze(-1)
        return ((first - second.flip(-1)) / scale).sort(dim=-1).values

    @torch.no_grad()
    def project(self) -> None:
        """Bring a and b back to positive values after an optimizer step (projected gradient)."""
        self.a.clamp_(min=SCALE_FLOOR)
        self.b.clamp_(min=SCALE_FLOOR)


def surrogate_bound(first: Tensor, second: Tensor, scale: Tensor, kind: Literal["squared", "absolute"]) -> Tensor:
    """Upper bound on the error of the reconstruction from the errors on both surrogates.

    Squared errors: (p - q)^2 <= 2 (p^2 + q^2), so 2 (l1 + l2) / (a + b)^2. Absolute ones: (l1 + l2) / (a + b).

    Args:
        first, second: errors on the surrogates, `[..., target]`.
        scale: a + b, `[target]`.
        kind: what the errors are.
    """
    if kind == "squared":
        return 2 * (first + second) / scale.square()
    return (first + second) / scale
