"""`dualweaver forecast`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dualweaver.cli.options import FIT_OPTIONS, DataFile, estimator, takes
from dualweaver.errors import DualWeaverError, SettingError

__all__ = ["forecast"]


@takes(*FIT_OPTIONS)
def forecast(
    data: DataFile,
    output: Annotated[Path | None, typer.Option(help="csv or parquet to write; the terminal by default")] = None,
    plot: Annotated[Path | None, typer.Option(help="figure to write: png, pdf or svg")] = None,
    quantiles: Annotated[str | None, typer.Option(help="levels in (0, 1), separated by commas")] = None,
    save: Annotated[Path | None, typer.Option(help="folder to keep the fitted forecaster in")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="folder that keeps how far the fit has come; run again to go on from there")
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Fit on a table and forecast the steps that follow it."""
    from dualweaver.data.files import read_file, write_aside, write_file

    levels = _levels(quantiles)
    model = estimator(options)
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


def _levels(text: str | None) -> list[float] | None:
    """The levels of --quantiles, checked before anything is fitted."""
    from dualweaver.forecast.calibration import check_levels

    if text is None:
        return None
    try:
        return list(check_levels([float(part) for part in text.split(",")]))
    except DualWeaverError:
        raise
    except ValueError as error:
        raise SettingError(f"--quantiles {text!r}: expected numbers separated by commas, such as 0.1,0.9") from error
