"""`dualweaver backbones` and `dualweaver datasets`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

__all__ = ["backbones", "datasets"]


def backbones() -> None:
    """List the backbones, their default checkpoints, licences of code and weights, and the extras that they need."""
    from dualweaver.backbones import available_backbones

    whole = Column("default checkpoint", overflow="fold")  # to be copied, so never cut
    table = Table("name", whole, "what it is", "licence", "extra")
    for name, backbone in available_backbones().items():
        checkpoint = backbone.default_checkpoint or "inside the package"
        table.add_row(name, checkpoint, backbone.summary, backbone.licence, backbone.extra or "")
    Console().print(table)


def datasets(
    name: Annotated[str | None, typer.Argument(help="data set to find, or download, and describe")] = None,
) -> None:
    """List the benchmark data sets, or find one and describe it."""
    from dualweaver.data.catalogue import available_datasets, describe_dataset, locate_dataset

    console = Console()
    if name is None:
        table = Table("name", "rows", "channels", "step", "licence")
        for known in available_datasets():
            info = describe_dataset(known)
            table.add_row(known, str(info.rows), str(info.channels), info.frequency, info.licence)
        console.print(table)
        return
    info = describe_dataset(name)
    table = Table(show_header=False)
    for label in ("name", "description", "source", "licence", "frequency", "rows", "channels", "split"):
        table.add_row(label, str(getattr(info, label)))
    table.add_row("file", str(locate_dataset(name)))
    console.print(table)
