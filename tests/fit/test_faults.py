"""A process that is killed while it fits, at any moment, costs time and not a bit of the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_a_fit_killed_at_20_random_moments_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    script = HELPERS / "faults.py"
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20", "0"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},  # a process with a GPU cannot fork
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    undisturbed = {row["fit"]: row["stops"] for row in rows if not row["kills"]}
    killed = [row for row in rows if row["kills"]]
    assert len(killed) == 20
    assert not [row for row in rows if not row["equal"]]
    # what was done before the kill is not done again: a kill in the last third leaves less than two thirds
    late = [row for row in killed if row["kills"][0] > 2 / 3 * undisturbed[row["fit"]]]
    assert late
    assert all(row["stops"] < 2 / 3 * undisturbed[row["fit"]] for row in late)
