"""Random numbers of our own, so that one seed governs a fit and the caller's stay where they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Our own random numbers; the caller's stay where they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
