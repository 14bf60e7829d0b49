"""`dualweaver` on the command line: forecast and backtest a table, list backbones and data sets, profile, plan."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from dualweaver._version import __version__
from dualweaver.errors import DataError, DualWeaverError, SettingError
from dualweaver.planning.commands import register

__all__ = ["app", "main"]

app = typer.Typer(
    help="Multivariate forecasting with a frozen univariate foundation model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DataFile = Annotated[Path, typer.Argument(help="csv (or csv.gz) or parquet file, one row a time step")]
Backbone = Annotated[str, typer.Option(help="name, or name:checkpoint; see `dualweaver backbones`")]
Horizon = Annotated[int, typer.Option(help="steps to forecast")]
Context = Annotated[int | None, typer.Option(help="past steps that a forecast sees")]
Adapter = Annotated[str, typer.Option(help="dualweaver, adapts, fine-tune, zero-shot or auto")]
Targets = Annotated[str | None, typer.Option(help="columns to forecast, separated by commas; all by default")]
TimeColumn = Annotated[str | None, typer.Option(help="column with the time stamps; found by itself where possible")]
EntityColumn = Annotated[str | None, typer.Option(help="column that tells independent systems apart")]
Freq = Annotated[str | None, typer.Option(help="step of the time stamps (pandas alias), where it cannot be inferred")]
Missing = Annotated[str, typer.Option(help="interpolate, ffill or raise")]
MissingValue = Annotated[list[float] | None, typer.Option(help="number that stands for a missing value; repeatable")]
Epochs = Annotated[int, typer.Option(help="epochs at most")]
Precision = Annotated[str, typer.Option(help="of the backbone's weights: 32, bf16 or auto")]
Seed = Annotated[int, typer.Option(help="governs all randomness")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress and no summary")]


@app.command(epilog="Example: dualweaver forecast data.csv --horizon 96 --output forecast.csv --plot forecast.png")
def forecast(
    data: DataFile,
    horizon: Horizon = 96,
    output: Annotated[Path | None, typer.Option(help="csv or parquet to write; the terminal by default")] = None,
    plot: Annotated[Path | None, typer.Option(help="figure to write: png, pdf or svg")] = None,
    quantiles: Annotated[str | None, typer.Option(help="levels in (0, 1), separated by commas")] = None,
    backbone: Backbone = "fracast",
    context_length: Context = None,
    adapter: Adapter = "dualweaver",
    targets: Targets = None,
    time_column: TimeColumn = None,
    entity_column: EntityColumn = None,
    freq: Freq = None,
    missing: Missing = "interpolate",
    missing_value: MissingValue = None,
    max_epochs: Epochs = 10,
    precision: Precision = "32",
    save: Annotated[Path | None, typer.Option(help="folder to keep the fitted forecaster in")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="folder that keeps how far the fit has come; run again to go on from there")
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Fit on a table and forecast the steps that follow it."""
    from dualweaver.data.files import read_file, write_aside, write_file

    levels = _levels(quantiles)
    model = _model(locals())
    frame = read_file(data)
    model.fit(frame, resume=resume)
    future = model.predict(quantiles=levels)
    if save is not None:
        model.save(save)
    keep_index = model.layout_.time_column is None
    if output is None:
        print(future.to_csv(index=keep_index), end="")
    else:
        write_file(future, output, index=keep_index)
    if plot is not None:
        figure = model.plot(future) if levels and len(levels) > 1 else model.plot()
        write_aside(plot, lambda aside: figure.savefig(aside, dpi=150))


@app.command(epilog="Example: dualweaver backtest data.csv --horizon 48 --windows 8 --output scores.csv")
def backtest(
    data: DataFile,
    horizon: Horizon = 96,
    windows: Annotated[int, typer.Option(help="origins at the end of the table, one horizon apart")] = 8,
    metric: Annotated[
        str, typer.Option(help="what the table shows: mse, mae, rmse, smape, mase, pinball or coverage_80")
    ] = "mse",
    output: Annotated[Path | None, typer.Option(help="csv or parquet with all scores")] = None,
    backbone: Backbone = "fracast",
    context_length: Context = None,
    adapter: Adapter = "dualweaver",
    targets: Targets = None,
    time_column: TimeColumn = None,
    entity_column: EntityColumn = None,
    freq: Freq = None,
    missing: Missing = "interpolate",
    missing_value: MissingValue = None,
    max_epochs: Epochs = 10,
    precision: Precision = "32",
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Hold out the end of a table, fit on what is before, and score forecasts of the end beside zero-shot."""
    from dualweaver.data.files import read_file, write_file
    from dualweaver.evaluation import METRIC_NAMES

    if metric not in METRIC_NAMES:
        raise SettingError(f"--metric {metric!r}: expected one of {', '.join(METRIC_NAMES)}")
    model = _model(locals())
    frame = read_file(data)
    model.fit(_head(frame, horizon * windows, entity_column))
    report = model.backtest(frame, windows=windows)
    _refuse_seen(model, report.forecasts)
    table = Table(title=f"{metric} on the last {windows * horizon} rows, {windows} origins")
    scores = report.table(metric)
    for name in ("channel", *scores.columns):
        table.add_column(name, justify="left" if name == "channel" else "right")
    for channel, row in scores.iterrows():
        cells = [f"{value:+.1%}" if name == "gain" else f"{value:.4g}" for name, value in row.items()]
        table.add_row(str(channel), *cells, end_section=False)
    Console().print(table)
    if output is not None:
        write_file(report.scores, output, index=False)


@app.command(epilog="Example: dualweaver backbones")
def backbones() -> None:
    """List the backbones and their default checkpoints."""
    from dualweaver.backbones import available_backbones

    table = Table("name", "default checkpoint", "what it is")
    for name, backbone in available_backbones().items():
        table.add_row(name, backbone.default_checkpoint or "inside the package", backbone.summary)
    Console().print(table)


@app.command(epilog="Example: dualweaver datasets ETTh1")
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


register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a mistake ends in one line on stderr and exit status 2."""
    warnings.showwarning = _one_line
    try:
        status = app(args=arguments, standalone_mode=False)
    except DualWeaverError as error:
        _leave(str(error))
    except TyperException as error:
        _leave(error.format_message() if hasattr(error, "format_message") else str(error))
    except (KeyboardInterrupt, typer.Abort):
        _leave("interrupted", status=130)
    except BrokenPipeError:  # the reader of our output has left
        sys.exit(0)
    else:
        sys.exit(status if isinstance(status, int) else 0)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _model(options: dict[str, Any]) -> Any:
    """The estimator that the options of a command describe."""
    from dualweaver.forecaster import DualWeaver

    names = ("backbone", "horizon", "context_length", "adapter", "time_column", "entity_column", "freq")
    targets = options["targets"]
    return DualWeaver(
        **{name: options[name] for name in (*names, "missing", "max_epochs", "precision", "seed")},
        targets=None if targets is None else [part.strip() for part in targets.split(",")],
        missing_values=tuple(options["missing_value"] or ()),
        verbose=not options["quiet"],
    )


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


def _levels(text: str | None) -> list[float] | None:
    """The levels of --quantiles, checked before anything is fitted."""
    from dualweaver.calibration import check_levels

    if text is None:
        return None
    try:
        return list(check_levels([float(part) for part in text.split(",")]))
    except DualWeaverError:
        raise
    except ValueError as error:
        raise SettingError(f"--quantiles {text!r}: expected numbers separated by commas, such as 0.1,0.9") from error


def _refuse_seen(model: Any, forecasts: pd.DataFrame) -> None:
    """Rows were held out by their place in the file; that is the end in time only where the file is in order."""
    cutoff = forecasts["cutoff"].min()
    for tail in model.tails_:
        end = tail.index[-1]
        if (end.to_timestamp() if isinstance(end, pd.Period) else end) > cutoff:
            raise DataError(
                f"the rows are not in the order of time: {end} was fitted on before {cutoff}; sort the file"
            )


def _one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


def _leave(message: str, *, status: int = 2) -> None:
    print(f"dualweaver: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
