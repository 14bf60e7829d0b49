"""What `fit(df, resume=...)` keeps, what it refuses, and that nothing it meets on disk costs a fit."""

from __future__ import annotations

import errno
import json
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from killed import Breaks, bits, killed, model
from toys import Toy, refusal, waves

from dualweaver import DualWeaver
from dualweaver.cli.app import main
from dualweaver.fit import resume
from dualweaver.fit.stages import TUNED_SHARES
from dualweaver.method import FILTER_SHARES

pytestmark = pytest.mark.usefixtures("one_thread")

TRIED, TUNED_TRIED = len(FILTER_SHARES), len(TUNED_SHARES)  # forwards at the end of a stage
STAGES: dict[str, dict[str, Any]] = {
    "paper": {"objective": "paper"},
    "sampled": {"channel_sample": 2},
    "adapts": {"adapter": "adapts"},
    "fine-tune": {"adapter": "fine-tune"},
    "fine-tune first": {"fine_tune": True, "regularisation": 0.5},
}


def names(folder: Path) -> list[str]:
    """Files without their checksums."""
    return sorted(".".join(file.name.split(".")[:2]) for file in folder.iterdir())


@pytest.mark.parametrize("name", STAGES)
def test_resume_changes_no_bit_and_trains_nothing_twice(name, tmp_path):
    undisturbed = Breaks()
    expected = bits(model(undisturbed, **STAGES[name]).fit(waves()))
    assert bits(model(**STAGES[name]).fit(waves(), resume=tmp_path)) == expected
    again = Breaks()
    assert bits(model(again, **STAGES[name]).fit(waves(), resume=tmp_path)) == expected
    # the horizon, the cost of a forward, two scores, the shares of the filter's edit and two forecasts
    assert again.forwards <= 10 + TUNED_TRIED < undisturbed.forwards
    assert all("done" in file or file == "resume.json" for file in names(tmp_path))


def test_a_fit_goes_on_from_its_last_epoch_and_finished_stages_are_not_repeated(tmp_path):
    undisturbed = Breaks()
    expected = bits(model(undisturbed, fine_tune=True, max_epochs=8).fit(waves()))
    killed(tmp_path, undisturbed.forwards - 3 - TUNED_TRIED, fine_tune=True, max_epochs=8)
    kept = names(tmp_path)
    assert [name for name in kept if "epoch" in name] == ["dualweaver.epoch-0006", "dualweaver.epoch-0007"]
    assert [name for name in kept if "done" in name] == [
        "fine-tune-trial-of-0-0001.done",
        "fine-tune-trial-of-0-001.done",
        "fine-tune-trial-of-1e-05.done",
        "fine-tune.done",
    ]
    rest = Breaks()
    assert bits(model(rest, fine_tune=True, max_epochs=8).fit(waves(), resume=tmp_path)) == expected
    assert rest.forwards < undisturbed.forwards / 3


def test_early_stopping_survives_a_kill(tmp_path):
    settings: dict[str, Any] = {"max_epochs": 40, "learning_rate": 0.1, "context_filter": False}
    undisturbed = Breaks()
    expected = bits(model(undisturbed, **settings).fit(waves()))
    assert len(json.loads(expected["history"])["epoch"]) < 40
    killed(tmp_path, undisturbed.forwards - 8, **settings)
    assert bits(model(**settings).fit(waves(), resume=tmp_path)) == expected


def test_after_ctrl_c_the_best_is_kept_and_the_same_fit_can_go_on(tmp_path):
    expected = bits(model().fit(waves()))
    with pytest.warns(UserWarning, match="interrupted"):
        stopped = model(Breaks(20, lambda: signal.raise_signal(signal.SIGINT))).fit(waves(), resume=tmp_path)
    assert stopped.predict().notna().all(axis=None)
    assert "dualweaver.done" not in names(tmp_path)
    assert bits(model().fit(waves(), resume=tmp_path)) == expected


@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied", "of another fit"])
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(damage, tmp_path):
    undisturbed = Breaks()
    expected = bits(model(undisturbed).fit(waves()))
    folder = tmp_path / "resume"
    killed(folder, undisturbed.forwards - 3 - TRIED)
    newest = max(folder.glob("*.epoch-*"))
    content = newest.read_bytes()
    if damage == "of another fit":
        killed(tmp_path / "other", undisturbed.forwards - 3 - TRIED, seed=1)
        foreign = max((tmp_path / "other").glob("*.epoch-*"))
        newest.unlink()
        (folder / foreign.name).write_bytes(foreign.read_bytes())
    else:
        changed = content[:100] + b"?" + content[101:]
        newest.write_bytes({"truncated": content[:-1], "changed": changed, "emptied": b""}[damage])
    with pytest.warns(UserWarning, match=r"epoch-0004.*is damaged, or belongs to another fit"):
        resumed = model().fit(waves(), resume=folder)
    assert bits(resumed) == expected


def test_checkpoints_hold_no_frozen_backbone_and_plain_values_only(tmp_path, monkeypatch):
    allowed, load = [], torch.load

    def spy(*arguments: Any, **options: Any) -> Any:
        allowed.append(options["weights_only"])
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", spy)
    killed(tmp_path, 20)
    (newest, *_) = sorted(tmp_path.glob("*.epoch-*"), reverse=True)
    state = load(newest, weights_only=True)
    assert not [name for name in state["state_dict"] if name.startswith("backbone.")]
    model().fit(waves(), resume=tmp_path)
    assert allowed == [True]


OTHER_FITS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "epochs": ({"max_epochs": 6}, None, "max_epochs 5 there, 6 here"),
    "seed": ({"seed": 3}, None, "seed 0 there, 3 here"),
    "adapter": ({"adapter": "adapts"}, None, "adapter dualweaver there, adapts here"),
    "targets": ({"targets": ["a"]}, None, r"targets \[0, 1, 2\] there, \[0\] here"),
    "rows": ({}, waves(401), "rows 400 there, 401 here"),
    "columns": ({}, waves(columns="abd"), "columns .*'c'.* there, .*'d'.* here"),
    "values": ({}, waves(seed=1), "data [0-9a-f]{16} there, [0-9a-f]{16} here"),
    "units": ({}, waves() * 2, "data [0-9a-f]{16} there, [0-9a-f]{16} here"),
    "backbone": ({"backbone": Toy(seed=1)}, None, "backbone weights [0-9a-f]{16} there, [0-9a-f]{16} here"),
}


@pytest.mark.parametrize("name", OTHER_FITS)
def test_another_fit_is_refused_by_what_differs_and_harms_nothing(name, tmp_path):
    killed(tmp_path, 20)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    settings, df, message = OTHER_FITS[name]
    other = model(settings.pop("backbone", None) if "backbone" in settings else None, **settings)
    text = refusal(other.fit, waves() if df is None else df, resume=tmp_path)
    assert re.search(rf"resume folder {tmp_path} belongs to another fit: {message}", text)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_many_columns_do_not_make_a_long_message(tmp_path):
    df = pd.DataFrame(np.random.default_rng(0).normal(size=(120, 300)), columns=[f"sensor {i}" for i in range(300)])
    model(max_epochs=1).fit(df, resume=tmp_path)
    message = refusal(model(max_epochs=1).fit, df.rename(columns={"sensor 299": "last"}), resume=tmp_path)
    assert "'sensor 299'\"] there" in message
    assert "\"'last'\"] here" in message
    assert len(message) < 500


def test_how_much_is_printed_is_not_part_of_a_fit(tmp_path, capsys):
    model().fit(waves(), resume=tmp_path)
    model(verbose=True).fit(waves(), resume=tmp_path)
    assert "validation MSE" in capsys.readouterr().err


def test_places_that_cannot_be_resume_folders_are_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "cannot use the resume folder" in refusal(model().fit, waves(), resume=tmp_path / "file")
    assert "cannot use the resume folder" in refusal(model().fit, waves(), resume=tmp_path / "file" / "below")
    assert "is not empty and holds no resume.json" in refusal(model().fit, waves(), resume=tmp_path)
    for text in ("", "{", "[1]", "[" * 10**5, "\x00"):
        folder = tmp_path / "torn"
        folder.mkdir(exist_ok=True)
        (folder / "resume.json").write_text(text)
        assert "resume.json cannot be read" in refusal(model().fit, waves(), resume=folder)
    assert (tmp_path / "file").read_text() == "mine"


def fail(monkeypatch: pytest.MonkeyPatch, number: int, name: str = "") -> None:
    """Writes fail, of files whose names hold `name`."""
    replace = resume.replace_file

    def fails(file: Path, content: bytes, aside: Path) -> None:
        if name in file.name:
            aside.write_bytes(content[: len(content) // 2])
            raise OSError(number, {errno.ENOSPC: "No space left on device"}.get(number, "Permission denied"))
        replace(file, content, aside)

    monkeypatch.setattr(resume, "replace_file", fails)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_refused_before_training(number, tmp_path, monkeypatch):
    fail(monkeypatch, number)
    backbone = Breaks()
    text = refusal(model(backbone).fit, waves(), resume=tmp_path / "resume")
    assert text.startswith(f"cannot use the resume folder {tmp_path / 'resume'}: ")
    assert backbone.forwards < 10


def test_a_disk_that_fills_up_during_training_costs_a_notice_and_no_fit(tmp_path, monkeypatch):
    undisturbed = Breaks()
    expected = bits(model(undisturbed).fit(waves()))
    killed(tmp_path, undisturbed.forwards - 8 - TRIED)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.pt")}
    with monkeypatch.context() as patch:
        fail(patch, errno.ENOSPC, ".pt")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted = model().fit(waves(), resume=tmp_path)
    told = [str(warning.message) for warning in caught if "resume folder" in str(warning.message)]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert bits(fitted) == expected
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.pt")} == before
    assert bits(model().fit(waves(), resume=tmp_path)) == expected


def test_saving_a_fit_is_refused_in_one_line_where_the_disk_is_full_and_it_stays_usable(tmp_path, monkeypatch):
    fitted = model().fit(waves())
    fitted.save(tmp_path / "saved")
    expected = fitted.predict()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        text = refusal(fitted.save, tmp_path / "saved")
    assert text == f"cannot save to {tmp_path / 'saved'}: No space left on device"
    pd.testing.assert_frame_equal(fitted.predict(), expected)
    pd.testing.assert_frame_equal(DualWeaver.load(tmp_path / "saved", backbone=Toy()).predict(), expected)


def test_without_resume_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model().fit(waves())
    assert list(tmp_path.iterdir()) == []


def test_settings_given_as_numpy_numbers_are_the_same_settings(tmp_path):
    expected = bits(model().fit(waves(), resume=tmp_path))
    assert bits(model(max_epochs=np.int64(5)).fit(waves(), resume=tmp_path)) == expected


def test_the_command_line_resumes_and_names_what_differs(tmp_path, capsys, monkeypatch):
    waves(300).rename_axis("time").to_csv(tmp_path / "data.csv")
    arguments = ["forecast", str(tmp_path / "data.csv"), "--horizon", "8", "--context-length", "64", "--quiet"]
    arguments += ["--resume", str(tmp_path / "resume"), "--max-epochs"]
    outputs = []
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            main([*arguments, "1"])
        assert left.value.code == 0
        outputs.append(capsys.readouterr().out)
        monkeypatch.setattr("dualweaver.fit.training.L.Trainer", lambda **_: pytest.fail("trained again"))
    assert outputs[0] == outputs[1] != ""
    with pytest.raises(SystemExit) as left:
        main([*arguments, "2"])
    assert left.value.code == 2
    assert "max_epochs 1 there, 2 here" in capsys.readouterr().err
