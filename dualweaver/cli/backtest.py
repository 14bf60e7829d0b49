"""`dualweaver backtest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from dualweaver.cli.options import FIT_OPTIONS, DataFile, estimator, takes
from dualweaver.errors import DataError, SettingError

__all__ = ["backtest"]


@takes(*FIT_OPTIONS)
def backtest(
    data: DataFile,
    windows: Annotated[int, typer.Option(help="origins at the end of the table, one horizon apart")] = 8,
    metric: Annotated[
        str, typer.Option(help="what the table shows: mse, mae, rmse, smape, mase, pinball or coverage_80")
    ] = "mse",
    output: Annotated[Path | None, typer.Option(help="csv or parquet with all scores")] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Hold out the end of a table, fit on what is before, and score forecasts of the end beside zero-shot."""
    from dualweaver.data.files import read_file, write_file
    from dualweaver.evaluation.backtest import METRIC_NAMES

    if metric not in METRIC_NAMES:
        raise SettingError(f"--metric {metric!r}: expected one of {', '.join(METRIC_NAMES)}")
    model = estimator(options)
    frame = read_file(data)
    model.fit(_head(frame, model.horizon * windows, model.entity_column))
    report = model.backtest(frame, windows=windows)
    _refuse_seen(model, report.forecasts)
    table = Table(title=f"{metric} on the last {windows * model.horizon} rows, {windows} origins")
    scores = report.table(metric)
    for name in ("channel", *scores.columns):
        table.add_column(name, justify="left" if name == "channel" else "right")
    for channel, row in scores.iterrows():
        cells = [f"{value:+.1%}" if name == "gain" else f"{value:.4g}" for name, value in row.items()]
        table.add_row(str(channel), *cells, end_section=False)
    Console().print(table)
    if output is not None:
        write_file(report.scores, output, index=False)


def _head(frame: pd.DataFrame, rows: int, entity_column: str | None) -> pd.DataFrame:
    """The table without the last rows of every entity (or, in the long form, of every series)."""
    group = entity_column or ("unique_id" if {"unique_id", "ds", "y"} <= set(frame.columns) else None)
    if group is None:
        return frame.iloc[:-rows]
    if group not in frame.columns:
        raise SettingError(
            f"--entity-column {group!r} is not a column; columns are {', '.join(map(str, frame.columns))}"
        )
    return frame[frame.groupby(group).cumcount(ascending=False) >= rows]


def _refuse_seen(model: Any, forecasts: pd.DataFrame) -> None:
    """Rows were held out by their place in the file; that is the end in time only where the file is in order."""
    cutoff = forecasts["cutoff"].min()
    for tail in model.tails_:
        end = tail.index[-1]
        if (end.to_timestamp() if isinstance(end, pd.Period) else end) > cutoff:
            raise DataError(
                f"the rows are not in the order of time: {end} was fitted on before {cutoff}; sort the file"
            )
