"""`dualweaver profile` and `dualweaver plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dualweaver.cli.options import REQUIRED, takes

__all__ = ["plan", "profile"]

Channels = Annotated[int, typer.Option(help="columns, all of them forecast")]
STEP_OPTIONS = ("backbone", "batch_size", "horizon", "context_length", "adapter", "objective", "precision")


@takes(*STEP_OPTIONS, batch_size=4)
def profile(
    channels: Channels = 7,
    steps: Annotated[int, typer.Option(help="steps that are timed")] = 3,
    json: Annotated[Path | None, typer.Option(help="file for everything that was measured")] = None,
    plot: Annotated[Path | None, typer.Option(help="figure of memory over a step: png, pdf or svg")] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Time and memory of a few training steps on made-up data, by phase and by what holds memory."""
    from dualweaver.planning.profiling import profile as measure

    found = measure(channels=channels, steps=steps, **options)
    Console().print(found)
    if json is not None:
        found.save(json)
    if plot is not None:
        found.plot().savefig(plot, dpi=150)


@takes("memory_budget", *STEP_OPTIONS, "devices", memory_budget=REQUIRED)
def plan(channels: Channels = 7, *, options: dict[str, Any]) -> None:
    """How to train within so much memory: micro-batch, pieces, what to compute again, precision, devices."""
    from dualweaver.planning.search import plan as search

    found = search(channels=channels, **options)
    Console().print(found)
    for part in found.chosen.recompute:
        Console().print(f"computed again: {part}", highlight=False)
