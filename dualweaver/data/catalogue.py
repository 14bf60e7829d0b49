"""The benchmark data sets: what they are, where their files are, and how to read them.

The facts are in ``catalogue.json`` beside this module. No data comes with the package: a file is looked for in the
folder named by the environment variable ``DUALWEAVER_DATA``, then in the user's cache, and is downloaded otherwise.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pooch
from tqdm.auto import tqdm

from dualweaver.errors import DatasetUnavailableError, SettingError

__all__ = ["DatasetInfo", "available_datasets", "describe_dataset", "load_dataset", "locate_dataset"]

DATA_VARIABLE = "DUALWEAVER_DATA"

_CALENDAR = ["year", "month", "day", "hour"]


@dataclass(frozen=True)
class DatasetInfo:
    """What the catalogue knows about a data set.

    ``file`` is the published file; `file_names` lists all the forms accepted. ``checksums`` are those of its contents
    after decompression, as ``algorithm:digest``: the published file first, then copies of equal value (other line
    ends, fewer digits). ``split`` names a rule of `dualweaver.data.splits`; ``start`` is the first time stamp of
    a file that holds none.
    """

    name: str
    description: str
    source: str
    url: str | None
    licence: str
    file: str
    checksums: tuple[str, ...]
    frequency: str
    channels: int
    rows: int
    split: str
    start: str | None
    quirks: tuple[str, ...]

    @property
    def file_names(self) -> tuple[str, ...]:
        """The file names looked for, in order: as published, compressed, converted to parquet."""
        if self.file.endswith((".csv", ".txt")):
            return self.file, f"{self.file}.gz", f"{Path(self.file).stem}.parquet"
        return (self.file,)


@cache
def _catalogue() -> dict[str, DatasetInfo]:
    """All data sets by lower-case name."""
    text = resources.files("dualweaver.data").joinpath("catalogue.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    infos = [
        DatasetInfo(**{**entry, "checksums": tuple(entry["checksums"]), "quirks": tuple(entry["quirks"])})
        for entry in entries
    ]
    return {info.name.lower(): info for info in infos}


def available_datasets() -> list[str]:
    """Names of the data sets in the catalogue, whether their files are on disk or not."""
    return [info.name for info in _catalogue().values()]


def describe_dataset(name: str) -> DatasetInfo:
    """The catalogue's entry; names are not case-sensitive."""
    try:
        return _catalogue()[name.lower()]
    except KeyError:
        raise SettingError(f"unknown data set {name!r}; known: {', '.join(available_datasets())}") from None


def locate_dataset(name: str, *, progress: bool = True) -> Path:
    """Path of a data set's file, which is downloaded to the user's cache if it is nowhere else.

    Every folder is searched together with the folders directly inside it. A file whose checksum is wrong is refused,
    never skipped, since another copy may not be what its owner meant to use.
    """
    info = describe_dataset(name)
    folders = list(_folders())
    for folder in folders:
        for file_name in info.file_names:
            for path in (folder / file_name, *sorted(folder.glob(f"*/{file_name}"))):
                if path.is_file():
                    _verify(info, path)
                    return path
    return _download(info, folders, progress)


def load_dataset(name: str, *, progress: bool = True) -> pd.DataFrame:
    """A data set as a wide frame: a DatetimeIndex named ``date`` and one numeric column a channel.

    Rows are those of the file, in its order and number, so that the benchmark splits apply; missing values are NaN.
    Text columns are left out. What else to know about a data set is in ``describe_dataset(name).quirks``.
    """
    info = describe_dataset(name)
    path = locate_dataset(name, progress=progress)
    try:
        table = _read(path)
    except ImportError:
        raise DatasetUnavailableError(
            f'reading {path} needs pyarrow: pip install "dualweaver-forecast[parquet]"'
        ) from None
    except (OSError, ValueError) as error:
        raise DatasetUnavailableError(f"{path} cannot be read: {error}") from error
    frame = _dated(table, info).select_dtypes("number")
    if frame.shape != (info.rows, info.channels):
        raise DatasetUnavailableError(
            f"{path} is not the data set {info.name!r}: it has {len(frame)} rows and {frame.shape[1]} numeric columns "
            f"instead of {info.rows} and {info.channels}"
        )
    return frame


def _folders() -> Iterator[Path]:
    """The folders searched, in order."""
    if named := os.environ.get(DATA_VARIABLE):
        yield Path(named).expanduser()
    yield Path(pooch.os_cache("dualweaver"))


def _verify(info: DatasetInfo, path: Path) -> None:
    """Refuse a file whose contents are not those that the catalogue knows, if it knows any.

    A table converted to parquet cannot be checked, unless that is how it was published.
    """
    if not info.checksums or (path.suffix == ".parquet" and path.name != info.file):
        return
    try:
        found = {_checksum(path, algorithm) for algorithm in {known.split(":")[0] for known in info.checksums}}
    except (OSError, EOFError) as error:
        raise DatasetUnavailableError(f"{path} cannot be read ({error}); remove it to have it fetched anew") from error
    if found.isdisjoint(info.checksums):
        raise DatasetUnavailableError(
            f"{path} is not the published data set {info.name!r}: its contents have the checksum "
            f"{', '.join(sorted(found))} instead of {info.checksums[0]}; remove or rename it"
        )


def _checksum(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    # Compressing the same table twice rarely gives the same bytes, so the contents are what is checked.
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as contents:
        while block := contents.read(1 << 20):
            digest.update(block)
    return f"{algorithm}:{digest.hexdigest()}"


def _download(info: DatasetInfo, searched: list[Path], progress: bool) -> Path:
    """Fetch the published file into the user's cache, the last of the folders searched."""
    places = ", ".join(map(str, searched))
    advice = f"put {info.file} into one of them, or set {DATA_VARIABLE} to the folder that holds it"
    if info.url is None:
        raise DatasetUnavailableError(
            f"data set {info.name!r} is not on disk (searched {places}) and has no direct download; "
            f"get it from {info.source}; then {advice}"
        )
    pooch.get_logger().setLevel("WARNING")  # its advice is for those who call it, not for our users
    # pooch puts in the true total; a bar with none would count as no bar.
    with tqdm(desc=f"Downloading {info.name}", total=1, unit="B", unit_scale=True, disable=not progress) as bar:
        try:
            path = pooch.retrieve(
                info.url,
                known_hash=None,  # the contents are checked below, compressed or not
                fname=Path(urlsplit(info.url).path).name,
                path=searched[-1],
                downloader=pooch.HTTPDownloader(progressbar=bar, timeout=30),
            )
        except OSError as error:
            raise DatasetUnavailableError(
                f"data set {info.name!r} is not on disk (searched {places}) and {info.url} cannot be fetched "
                f"({type(error).__name__}); go online, or {advice}"
            ) from error
    try:
        _verify(info, Path(path))
    except DatasetUnavailableError:
        Path(path).unlink()
        raise DatasetUnavailableError(
            f"what {info.url} gave is not the published data set {info.name!r} (wrong checksum) and was removed; "
            f"try again, or {advice}"
        ) from None
    return Path(path)


def _read(path: Path) -> pd.DataFrame:
    """The file's table as it is, whatever its form."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return pd.DataFrame(archive["data"][:, :, 0]).rename(columns=str)
    if ".txt" in path.suffixes:
        return pd.read_csv(path, header=None).rename(columns=str)
    # Broken bytes in a column name must not keep anyone from the data.
    return pd.read_csv(path, encoding="utf-8", encoding_errors="replace")


def _dated(frame: pd.DataFrame, info: DatasetInfo) -> pd.DataFrame:
    """The frame with a DatetimeIndex ``date`` in place of whatever tells the time in it."""
    if "date" in frame:
        dates = pd.DatetimeIndex(pd.to_datetime(frame.pop("date")))
    elif set(_CALENDAR) <= set(frame.columns):
        dates = pd.DatetimeIndex(pd.to_datetime(frame[_CALENDAR]))
        frame = frame.drop(columns=[*_CALENDAR, "No"], errors="ignore")
    elif isinstance(frame.index, pd.DatetimeIndex):
        dates = frame.index
    elif info.start is None:
        raise DatasetUnavailableError(f"the file of the data set {info.name!r} has no column 'date'")
    else:
        dates = pd.date_range(info.start, periods=len(frame), freq=info.frequency)
    return frame.set_axis(dates.rename("date"))
