"""The command line as a whole: its commands, and how a mistake ends."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer
from typer.exceptions import TyperException

from dualweaver._version import __version__
from dualweaver.cli.backtest import backtest
from dualweaver.cli.forecast import forecast
from dualweaver.cli.lists import backbones, datasets
from dualweaver.cli.planning import plan, profile
from dualweaver.errors import DualWeaverError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Multivariate forecasting with a frozen univariate foundation model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command, example in (
    (forecast, "forecast data.csv --horizon 96 --output forecast.csv --plot forecast.png"),
    (backtest, "backtest data.csv --horizon 48 --windows 8 --output scores.csv"),
    (backbones, "backbones"),
    (datasets, "datasets ETTh1"),
    (profile, "profile --backbone ttm --channels 21 --plot memory.png"),
    (plan, "plan --backbone timer --channels 300 --memory-budget 4GB"),
):
    app.command(epilog=f"Example: dualweaver {example}")(command)


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


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {message}", file=sys.stderr)


def _leave(message: str, *, status: int = 2) -> None:
    print(f"dualweaver: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
