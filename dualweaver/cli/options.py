"""Every option of the command line once; those of the estimator take type, default and help from its declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from dualweaver.settings import Options, option_help

__all__ = ["FIT_OPTIONS", "REQUIRED", "DataFile", "estimator", "takes"]

DataFile = Annotated[Path, typer.Argument(help="csv (or csv.gz) or parquet file, one row a time step")]
REQUIRED = ...  # a default that makes an option required


class _Written(NamedTuple):
    """How the terminal writes an option that Python takes in another form."""

    kind: Any
    read: Callable[[Any], Any] = lambda value: value
    flag: str | None = None
    help: str | None = None
    default: Any = inspect.Parameter.empty


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _share_or_rows(number: float) -> float | int:
    return int(number) if number >= 1 and number.is_integer() else number


_WRITTEN = {
    "backbone": _Written(str),
    "validation_size": _Written(float, _share_or_rows),
    "targets": _Written(str | None, _names, help="columns to forecast, separated by commas; all by default"),
    "time_column": _Written(str | None),
    "entity_column": _Written(str | None),
    "freq": _Written(str | None),
    "missing_values": _Written(
        list[float] | None,
        lambda values: tuple(values or ()),
        "--missing-value",
        "number that stands for a missing value; repeatable",
        None,
    ),
    "memory_budget": _Written(str | None),
    "verbose": _Written(bool, lambda quiet: not quiet, "--quiet", "no progress and no summary", False),
}

# of `forecast` and `backtest`
FIT_OPTIONS = (
    "backbone",
    "horizon",
    "context_length",
    "adapter",
    "fine_tune",
    "targets",
    "time_column",
    "entity_column",
    "freq",
    "missing",
    "missing_values",
    "max_epochs",
    "batch_size",
    "learning_rate",
    "validation_size",
    "precision",
    "memory_budget",
    "seed",
    "verbose",
)


def takes(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the estimator's options of these names; it receives their values as `options`.

    Args:
        names: of options, in the order of `--help`.
        defaults: those of this command where they are not the estimator's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [part.replace(annotation=hints[part.name]) for part in inspect.signature(command).parameters.values()]
        parameters = [part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in own if part.name != "options"]
        parameters += [_parameter(name, defaults) for name in names]

        def run(**values: Any) -> None:
            options = {name: _value(name, values.pop(name)) for name in names}
            command(**values, options=options)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {part.name: part.annotation for part in parameters}
        return run

    return decorate


def estimator(options: dict[str, Any]) -> Any:
    """The forecaster that the options of a command describe."""
    from dualweaver.forecaster import DualWeaver

    return DualWeaver(**options)


def _parameter(name: str, defaults: dict[str, Any]) -> inspect.Parameter:
    written = _WRITTEN.get(name) or _Written(get_type_hints(Options)[name])
    known = getattr(Options, name) if written.default is inspect.Parameter.empty else written.default
    flags = [] if written.flag is None else [written.flag]
    option = typer.Option(*flags, help=written.help or option_help(name))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=defaults.get(name, known),
        annotation=Annotated[written.kind, option],
    )


def _value(name: str, value: Any) -> Any:
    return _WRITTEN[name].read(value) if name in _WRITTEN else value
