"""The benchmark catalogue: its facts, where files are looked for, what is refused, and downloads (from loopback)."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import pytest

from dualweaver.data import catalogue
from dualweaver.data.catalogue import DatasetInfo, available_datasets, describe_dataset, load_dataset, locate_dataset
from dualweaver.data.splits import split_borders
from dualweaver.errors import DatasetUnavailableError, SettingError

TEXT = b"date,a,b\n2020-01-01 00:00,1.0,2\n2020-01-01 01:00,1.5,3\n2020-01-01 02:00,,4\n"
NOWHERE = "http://127.0.0.1:9/tiny.csv"  # nothing listens on the discard port


def digest(contents: bytes) -> str:
    return "sha256:" + hashlib.sha256(contents).hexdigest()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., DatasetInfo]:
    """A catalogue of one data set of 3 rows and 2 channels, with empty folders to search."""
    monkeypatch.setenv("DUALWEAVER_DATA", str(tmp_path / "named"))
    monkeypatch.setattr(catalogue.pooch, "os_cache", lambda name: tmp_path / "cache")
    (tmp_path / "named").mkdir()
    usual = replace(
        describe_dataset("ETTh1"), name="Tiny", url=NOWHERE, file="tiny.csv", checksums=(digest(TEXT),),
        channels=2, rows=3,
    )  # fmt: skip

    def make(**changes: object) -> DatasetInfo:
        info = replace(usual, **changes)  # type: ignore[arg-type]
        monkeypatch.setattr(catalogue, "_catalogue", lambda: {"tiny": info})
        return info

    return make


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which a server on this machine offers it."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# Facts


@pytest.mark.parametrize("name", available_datasets())
def test_every_entry_is_complete_and_consistent(name: str) -> None:
    info = describe_dataset(name)
    assert info.description
    assert info.source
    assert info.licence
    assert sum(map(len, split_borders(info.rows, info.split))) <= info.rows
    assert pd.tseries.frequencies.to_offset(info.frequency) is not None
    lengths = {"sha256": 64, "md5": 32}
    assert info.checksums
    assert all(len(known.split(":")[1]) == lengths[known.split(":")[0]] for known in info.checksums)
    if info.url is not None:
        assert Path(urlsplit(info.url).path).name in info.file_names


def test_the_promised_data_sets_are_there() -> None:
    promised = "ETTh1 ETTh2 ETTm1 ETTm2 Weather Exchange ILI Electricity Traffic Solar PEMS03 PEMS04 PEMS07 PEMS08"
    assert set(promised.split()) < set(available_datasets())


def test_names_are_not_case_sensitive() -> None:
    assert describe_dataset("etTH1") == describe_dataset("ETTh1")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"unknown data set 'ETTh3'; known: ETTh1, .*PEMS08"):
        describe_dataset("ETTh3")


# Real files, where there are any


@pytest.mark.parametrize("name", available_datasets())
def test_a_real_file_loads_as_a_dated_numeric_frame(name: str, benchmark: Callable[[str], pd.DataFrame]) -> None:
    frame, info = benchmark(name), describe_dataset(name)
    assert frame.shape == (info.rows, info.channels)
    assert isinstance(frame.index, pd.DatetimeIndex)
    assert frame.index.name == "date"
    assert frame.index.is_monotonic_increasing
    assert all(pd.api.types.is_numeric_dtype(dtype) for dtype in frame.dtypes)
    step = pd.Series(frame.index).diff().mode()[0]
    assert step == pd.date_range("2020", periods=2, freq=info.frequency).diff()[1]


def test_weather_keeps_its_sentinels_and_has_readable_names(benchmark: Callable[[str], pd.DataFrame]) -> None:
    frame = benchmark("Weather")
    counts = (frame == -9999).sum()
    assert {str(column)[:8]: count for column, count in counts[counts > 0].items()} == {
        "wv (m/s)": 1,
        "max. PAR": 30,
        "OT": 50,
    }
    assert frame.columns[16] == "SWDR (W/m\N{REPLACEMENT CHARACTER})"


def test_shunyi_is_dated_by_its_calendar_columns_and_keeps_gaps(benchmark: Callable[[str], pd.DataFrame]) -> None:
    frame = benchmark("BeijingShunyi")
    assert " ".join(frame.columns) == "PM2.5 PM10 SO2 NO2 CO O3 TEMP PRES DEWP RAIN WSPM"
    assert frame.index[0] == pd.Timestamp("2013-03-01 00:00")
    assert frame.index.is_unique
    assert frame["PM2.5"].isna().sum() == 913


# Where files are looked for


@pytest.mark.parametrize("place", ["named", "cache", "named/folder-inside"])
@pytest.mark.parametrize("form", ["tiny.csv", "tiny.csv.gz"])
def test_a_file_is_found_in_either_folder_plain_or_compressed(
    place: str, form: str, tiny: Callable[..., DatasetInfo], tmp_path: Path
) -> None:
    tiny()
    path = tmp_path / place / form
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(TEXT) if form.endswith("gz") else TEXT)
    assert locate_dataset("TINY") == path
    frame = load_dataset("tiny")
    assert frame.columns.tolist() == ["a", "b"]
    assert frame.index.tolist() == pd.date_range("2020-01-01", periods=3, freq="h").tolist()
    assert np.isnan(frame["a"].iloc[2])


def test_the_named_folder_comes_before_the_cache(tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny()
    (tmp_path / "cache").mkdir()
    for folder in ("named", "cache"):
        (tmp_path / folder / "tiny.csv").write_bytes(TEXT)
    assert locate_dataset("tiny").parent.name == "named"


def test_a_table_converted_to_parquet_is_accepted(tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny()
    pytest.importorskip("pyarrow")
    dates = pd.date_range("2020", periods=3, freq="h", name="time")
    pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4, 5, 6], "text": "x"}, index=dates).to_parquet(
        tmp_path / "named" / "tiny.parquet"
    )
    frame = load_dataset("tiny")
    assert frame.columns.tolist() == ["a", "b"]
    assert frame.index.name == "date"


@pytest.mark.parametrize("form", ["solar.txt", "pems.npz"])
def test_files_without_names_and_dates_get_both(form: str, tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny(file=form, checksums=(), start="2018-01-01", frequency="5min")
    values = np.arange(6.0).reshape(3, 2)
    if form.endswith("npz"):
        np.savez(tmp_path / "named" / form, data=np.stack([values, -values], axis=-1))
    else:
        np.savetxt(tmp_path / "named" / form, values, delimiter=",")
    frame = load_dataset("tiny")
    assert frame.columns.tolist() == ["0", "1"]
    assert frame.index[2] == pd.Timestamp("2018-01-01 00:10")
    np.testing.assert_array_equal(frame, values)


def test_broken_bytes_in_a_column_name_do_not_keep_anyone_from_the_data(
    tiny: Callable[..., DatasetInfo], tmp_path: Path
) -> None:
    contents = TEXT.replace(b"a,b", b"W/m\xb2,b")
    tiny(checksums=(digest(contents),))
    (tmp_path / "named" / "tiny.csv").write_bytes(contents)
    assert load_dataset("tiny").columns[0] == "W/m\N{REPLACEMENT CHARACTER}"


# What is refused


def test_changed_contents_are_refused_by_name(tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny()
    path = tmp_path / "named" / "tiny.csv"
    path.write_bytes(TEXT + b"2020-01-01 03:00,1,1\n")
    with pytest.raises(DatasetUnavailableError, match=r"tiny.csv is not the published data set 'Tiny'.*checksum"):
        load_dataset("tiny")


def test_a_damaged_archive_is_refused_by_name(tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny()
    (tmp_path / "named" / "tiny.csv.gz").write_bytes(gzip.compress(TEXT)[:-12])
    with pytest.raises(DatasetUnavailableError, match=r"tiny.csv.gz cannot be read"):
        load_dataset("tiny")


def test_a_file_of_unknown_checksum_must_still_have_the_right_shape(
    tiny: Callable[..., DatasetInfo], tmp_path: Path
) -> None:
    tiny(checksums=(), rows=4)
    (tmp_path / "named" / "tiny.csv").write_bytes(TEXT)
    with pytest.raises(DatasetUnavailableError, match="3 rows and 2 numeric columns instead of 4 and 2"):
        load_dataset("tiny")


def test_a_file_without_time_stamps_is_refused(tiny: Callable[..., DatasetInfo], tmp_path: Path) -> None:
    tiny(checksums=())
    (tmp_path / "named" / "tiny.csv").write_bytes(b"a,b\n1,2\n3,4\n5,6\n")
    with pytest.raises(DatasetUnavailableError, match="no column 'date'"):
        load_dataset("tiny")


# Downloads


def test_a_missing_file_is_downloaded_once_into_the_cache(
    tiny: Callable[..., DatasetInfo],
    tmp_path: Path,
    served: tuple[Path, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, address = served
    (folder / "tiny.csv").write_bytes(TEXT)
    tiny(url=f"{address}/tiny.csv?download=1")
    path = locate_dataset("tiny")
    assert path == tmp_path / "cache" / "tiny.csv"
    assert path.read_bytes() == TEXT
    assert "Downloading Tiny" in capsys.readouterr().err
    (folder / "tiny.csv").unlink()
    assert locate_dataset("tiny") == path


def test_a_download_can_be_silent(
    tiny: Callable[..., DatasetInfo], served: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, address = served
    (folder / "tiny.csv.gz").write_bytes(gzip.compress(TEXT))
    tiny(url=f"{address}/tiny.csv.gz")
    assert len(load_dataset("tiny", progress=False)) == 3
    assert capfd.readouterr() == ("", "")


def test_a_download_with_a_wrong_checksum_is_refused_and_not_kept(
    tiny: Callable[..., DatasetInfo], tmp_path: Path, served: tuple[Path, str]
) -> None:
    folder, address = served
    (folder / "tiny.csv").write_bytes(b"<html>Please log in</html>")
    tiny(url=f"{address}/tiny.csv")
    with pytest.raises(DatasetUnavailableError, match="is not the published data set 'Tiny'"):
        locate_dataset("tiny", progress=False)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("reachable", [True, False])
def test_what_cannot_be_fetched_ends_in_one_line_that_says_what_to_do(
    reachable: bool, tiny: Callable[..., DatasetInfo], tmp_path: Path, served: tuple[Path, str]
) -> None:
    url = f"{served[1]}/tiny.csv" if reachable else NOWHERE  # a server without the file, or none
    tiny(url=url)
    with pytest.raises(DatasetUnavailableError) as caught:
        load_dataset("tiny", progress=False)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'Tiny'", str(tmp_path / "named"), str(tmp_path / "cache"), url, "put tiny.csv", "DUALWEAVER_DATA"):
        assert part in message


def test_a_data_set_without_a_download_says_where_to_get_it(tiny: Callable[..., DatasetInfo]) -> None:
    tiny(url=None, source="the archive of somebody")
    with pytest.raises(DatasetUnavailableError, match=r"get it from the archive of somebody; then put tiny.csv into"):
        load_dataset("tiny")
