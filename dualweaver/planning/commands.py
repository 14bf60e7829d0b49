"""`dualweaver profile` and `dualweaver plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["register"]

Backbone = Annotated[str, typer.Option(help="name, or name:checkpoint; see `dualweaver backbones`")]
Channels = Annotated[int, typer.Option(help="columns, all of them forecast")]
Batch = Annotated[int, typer.Option(help="windows of a step of the optimizer")]
Horizon = Annotated[int, typer.Option(help="steps to forecast")]
Context = Annotated[int | None, typer.Option(help="past steps that a forecast sees")]
Adapter = Annotated[str, typer.Option(help="dualweaver, adapts or fine-tune")]
Objective = Annotated[str, typer.Option(help="reconstruction or paper")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog="Example: dualweaver profile --backbone ttm --channels 21 --plot memory.png")(profile)
    app.command(epilog="Example: dualweaver plan --backbone timer --channels 300 --memory-budget 4GB")(plan)


def profile(
    backbone: Backbone = "fracast",
    channels: Channels = 7,
    batch_size: Batch = 4,
    horizon: Horizon = 96,
    context_length: Context = None,
    adapter: Adapter = "dualweaver",
    objective: Objective = "reconstruction",
    precision: Annotated[str, typer.Option(help="of the backbone's weights: 32 or bf16")] = "32",
    steps: Annotated[int, typer.Option(help="steps that are timed")] = 3,
    json: Annotated[Path | None, typer.Option(help="file for everything that was measured")] = None,
    plot: Annotated[Path | None, typer.Option(help="figure of memory over a step: png, pdf or svg")] = None,
) -> None:
    """Time and memory of a few training steps on made-up data, by phase and by what holds memory."""
    from dualweaver.planning.profiling import profile as measure

    found = measure(
        backbone,
        channels=channels,
        batch_size=batch_size,
        horizon=horizon,
        context_length=context_length,
        adapter=adapter,
        objective=objective,
        precision=precision,
        steps=steps,
    )
    Console().print(found)
    if json is not None:
        found.save(json)
    if plot is not None:
        found.plot().savefig(plot, dpi=150)


def plan(
    memory_budget: Annotated[str, typer.Option(help="bytes for training on each device, such as 2GB or 1.5GiB")],
    backbone: Backbone = "fracast",
    channels: Channels = 7,
    batch_size: Batch = 32,
    horizon: Horizon = 96,
    context_length: Context = None,
    adapter: Adapter = "dualweaver",
    objective: Objective = "reconstruction",
    precision: Annotated[str, typer.Option(help="32, bf16, or auto: the plan chooses")] = "32",
    devices: Annotated[int, typer.Option(help="that may share a batch")] = 1,
) -> None:
    """How to train within so much memory: micro-batch, pieces, what to compute again, precision, devices."""
    from dualweaver.planning.search import plan as search

    found = search(
        backbone,
        memory_budget=memory_budget,
        channels=channels,
        batch_size=batch_size,
        horizon=horizon,
        context_length=context_length,
        adapter=adapter,
        objective=objective,
        precision=precision,
        devices=devices,
    )
    Console().print(found)
    for part in found.chosen.recompute:
        Console().print(f"computed again: {part}", highlight=False)
