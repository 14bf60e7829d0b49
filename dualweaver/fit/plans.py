"""A plan for every stage of a fit that has a memory budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from dualweaver.adapters import Adapter
from dualweaver.backbones import Backbone
from dualweaver.compute.limits import parse_bytes
from dualweaver.compute.plan import Plan
from dualweaver.planning.memory import storage_bytes
from dualweaver.planning.search import plan_training
from dualweaver.planning.step import Shape, training_device
from dualweaver.settings import FitSettings

__all__ = ["plan_stages"]


def plan_stages(
    stages: Sequence[Adapter], backbone: Backbone, settings: FitSettings, context_length: int, folder: Path | None
) -> None:
    """Give every stage of a fit a plan within the settings' budget.

    Args:
        stages: what is trained in turn.
        backbone: that they are trained around.
        settings: of the fit.
        context_length: past steps.
        folder: where plans are kept for a fit that goes on later: timings differ from run to run, and with the sizes of
            pieces the order of sums, so that bits would.
    """
    assert settings.memory_budget is not None
    budget = parse_bytes(settings.memory_budget)
    if settings.trains_backbone:  # a copy, beside the untouched one
        budget -= storage_bytes(backbone.parameters())
    for stage in stages:
        name = f"{stage.name}-after-fine-tuning" if settings.fine_tune else stage.name
        file = None if folder is None else folder / f"{name}.plan.json"
        if file is not None and file.exists():
            stage.plan = Plan.from_dict(json.loads(file.read_text()))
        else:
            shape = Shape(stage.channels, settings.batch_size // settings.devices, context_length, settings.horizon)
            here = next(backbone.parameters(), torch.zeros(())).device
            stage.plan = plan_training([backbone.to(training_device())], stage, shape, budget).chosen
            backbone.to(here)
            if file is not None:
                file.write_text(json.dumps(asdict(stage.plan), indent=2) + "\n")
        stage.pairs_at_once, stage.series_at_once = stage.plan.rows, stage.plan.series
