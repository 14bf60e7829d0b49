"""Where things lie that tests read or start."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["EXPERIMENTS", "HELPERS", "ROOT", "SHARED", "TTM_WEIGHTS", "needs_ttm_weights"]

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
EXPERIMENTS = ROOT / "experiments"
SHARED = ROOT.parent / "shared"  # real data, weights and recordings, where there are any

TTM_WEIGHTS = SHARED / "weights" / "ttm-r2-512-96"
needs_ttm_weights = pytest.mark.skipif(
    not TTM_WEIGHTS.is_dir(), reason="the public TTM-R2 checkpoint is not beside the project"
)
