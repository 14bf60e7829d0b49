"""Tables on disk: csv (compressed or not) and parquet, read with clear errors and written aside, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from dualweaver.errors import DataError

__all__ = ["read_file", "write_aside", "write_file"]


def read_file(path: str | os.PathLike[str]) -> pd.DataFrame:
    """A table from a csv or parquet file, by its name's ending."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no file {str(file)!r}; give a csv or parquet file")
    try:
        if file.suffix == ".parquet":
            return pd.read_parquet(file)
        return pd.read_csv(file, encoding_errors="replace")
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs pyarrow; pip install 'dualweaver-forecast[parquet]'") from error
    except (ValueError, OSError, EOFError) as error:  # pandas' parser errors are ValueErrors
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{file} cannot be read as a table ({first_line})") from error


def write_file(frame: pd.DataFrame, path: str | os.PathLike[str], *, index: bool) -> None:
    """Write a table as csv or parquet, by the name's ending; whole or not at all."""
    file = Path(path)
    if file.suffix == ".parquet":
        write_aside(file, lambda aside: frame.to_parquet(aside, index=index or None))
    else:
        write_aside(file, lambda aside: frame.to_csv(aside, index=index))  # compressed where the ending says so


def write_aside(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `file`, then rename it: what was there stays until the new is whole."""
    aside: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{file.stem}.", suffix=file.suffix, dir=file.parent)
        os.close(descriptor)
        aside = Path(name)
        write(aside)
        aside.chmod(0o644)
        aside.replace(file)
        aside = None
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)
