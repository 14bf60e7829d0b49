"""The command line as its users see it: files in, files out, one line for a mistake."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from command_line import run
from small_backbones import tiny_ttm
from toys import waves

from dualweaver import DualWeaver


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights") / "ttm"
    tiny_ttm().save_pretrained(folder)
    return f"ttm:{folder}"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "data.csv"
    waves(300).rename_axis("date").to_csv(file)
    return file


def test_forecast_writes_the_rows_that_follow_and_a_figure(table: Path, backbone: str, tmp_path: Path) -> None:
    output, figure = tmp_path / "new" / "f.csv", tmp_path / "f.png"
    options = ["--backbone", backbone, "--max-epochs", 1, "--horizon", 12, "--quiet"]
    assert run("forecast", table, *options, "--output", output, "--plot", figure, "--quantiles", "0.1,0.9") == 0
    forecast = pd.read_csv(output, parse_dates=["date"])
    last = pd.read_csv(table, parse_dates=["date"])["date"].iloc[-1]
    assert list(forecast["date"]) == list(pd.date_range(last, periods=13, freq="h")[1:])
    assert list(forecast.columns[1:]) == [f"{name}{part}" for name in "abc" for part in ("", "_q0.1", "_q0.9")]
    assert forecast["a"].between(0, 20).all()  # the data's units, not standardised ones
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in output.parent.iterdir()] == ["f.csv"]


def test_without_output_the_forecast_goes_to_the_terminal(
    table: Path, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("forecast", table, "--backbone", backbone, "--max-epochs", 1, "--horizon", 4, "--quiet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "date,a,b,c"
    assert len(lines) == 5


def test_a_saved_forecaster_can_be_loaded(table: Path, backbone: str, tmp_path: Path) -> None:
    options = ["--backbone", backbone, "--max-epochs", 1, "--horizon", 8, "--quiet", "--targets", "b"]
    options += ["--precision", "bf16"]
    assert run("forecast", table, *options, "--save", tmp_path / "kept", "--output", tmp_path / "f.csv") == 0
    kept = DualWeaver.load(tmp_path / "kept")
    assert kept.precision == "bf16"
    again = kept.predict()
    written = pd.read_csv(tmp_path / "f.csv")
    assert list(written.columns) == ["date", "b"]
    assert again["b"].to_numpy() == pytest.approx(written["b"].to_numpy())


def test_backtest_shows_a_row_per_channel_and_writes_all_scores(
    table: Path, backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backbone", backbone, "--max-epochs", 1, "--horizon", 8, "--windows", 3, "--quiet"]
    assert run("backtest", table, *options, "--output", tmp_path / "scores.csv") == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("zero-shot", "seasonal-naive", "gain", "mean"))
    assert set(pd.read_csv(tmp_path / "scores.csv")["unique_id"]) == set("abc")


def test_backtest_never_fits_on_what_it_scores(table: Path, backbone: str) -> None:
    frame = pd.read_csv(table)
    frame.sample(frac=1, random_state=0).to_csv(table, index=False)
    assert run("backtest", table, "--backbone", backbone, "--max-epochs", 1, "--horizon", 8, "--quiet") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["forecast", "nowhere.csv"], "nowhere.csv"),
        (["forecast", "{table}", "--backbone", "gpt"], "fracast"),
        (["forecast", "{table}", "--horizon", "0"], "horizon=0"),
        (["forecast", "{table}", "--horizon", "many"], "horizon"),
        (["forecast", "{table}", "--quantiles", "0.1,1.5"], "1.5"),
        (["forecast", "{table}", "--quantiles", "low"], "0.1,0.9"),
        (["forecast", "{table}", "--targets", "z"], "'z'"),
        (["forecast", "{table}", "--precision", "16"], "32, bf16, auto"),
        (["backtest", "{table}", "--metric", "beauty", "--backbone", "{backbone}", "--horizon", "8"], "beauty"),
        (["datasets", "nothing"], "ETTh1"),
        (["forecats"], "forecats"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    arguments: list[str], told: str, table: Path, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(argument.format(table=table, backbone=backbone) for argument in arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert told in lines[0]


def test_a_file_that_is_no_table_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.csv.gz"
    file.write_bytes(b"\x00\x01")
    assert run("forecast", file) == 2
    assert "broken.csv.gz" in capsys.readouterr().err


def test_lists_name_every_backbone_and_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    models = ("fracast", "ttm", "sundial", "timesfm", "chronos-2", "Apache-2.0")
    for command, names in (("backbones", models), ("datasets", ("ETTm2", "Weather", "PEMS08"))):
        assert run(command) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in names)


@pytest.mark.parametrize("command", ["forecast", "backtest", "backbones", "datasets"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"Example: dualweaver {command}" in " ".join(capsys.readouterr().out.split())
