"""Saved folders: whole or not at all, nothing executed, and every damage named."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from toys import Toy, waves, weaver

from dualweaver import DualWeaver
from dualweaver.compute.storage import read_folder, write_folder
from dualweaver.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

TOUCHES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.scandir", "os.listdir"})


class Faults:
    """Counts the operations on files below a folder, and breaks off one of them; hooks themselves cannot be removed."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in TOUCHES:
            return
        if isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(str(self.folder)):
            self.touch(event)

    def touch(self, event: str) -> None:
        self.seen.append(event)
        if len(self.seen) == self.at:
            self.fault()

    def watch(self, folder: Path, at: float = math.inf, fault: Callable[[], None] = lambda: None) -> None:
        self.folder, self.at, self.fault, self.seen = folder, at, fault, list[str]()

    def rest(self) -> None:
        self.folder = None


FAULTS = Faults()


@pytest.fixture
def faults(monkeypatch) -> Iterator[Faults]:
    flush = os.fsync

    def fsync(handle: int) -> None:
        if FAULTS.folder is not None:
            FAULTS.touch("fsync")
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    yield FAULTS
    FAULTS.rest()


def save(folder: Path, number: int) -> None:
    write_folder(folder, {"number": number}, {"x": torch.full((1000,), float(number))}, {"w": torch.ones(3)})


def saved(folder: Path) -> int:
    config, adapter, backbone = read_folder(folder)
    assert backbone is not None
    assert (adapter["x"] == config["number"]).all()
    return config["number"]


def operations(faults: Faults, folder: Path) -> int:
    save(folder, 1)
    faults.watch(folder.parent)
    save(folder, 1)
    faults.rest()
    assert {"open", "os.mkdir", "os.rename", "fsync"} <= set(faults.seen)
    return len(faults.seen)


def test_a_full_disk_at_any_moment_leaves_a_whole_save_and_one_error(faults, tmp_path):
    def full() -> None:
        raise OSError(28, "No space left on device")

    messages = []
    for at in range(1, operations(faults, tmp_path / "saved") + 1):
        before = saved(tmp_path / "saved")
        faults.watch(tmp_path, at, full)
        try:
            save(tmp_path / "saved", before + 1)
            expected = {before + 1}
        except CheckpointError as error:
            messages.append(str(error))
            expected = {before}
            assert (tmp_path / "saved").is_dir()  # under its own name
        faults.rest()
        assert saved(tmp_path / "saved") in expected, at
    assert len(messages) >= 6
    assert set(messages) == {f"cannot save to {tmp_path / 'saved'}: No space left on device"}
    save(tmp_path / "saved", 100)  # whatever was left behind is not in the way
    assert saved(tmp_path / "saved") == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_moment_leaves_a_whole_save(faults, tmp_path):
    for at in range(1, operations(faults, tmp_path / "saved") + 1):
        before = saved(tmp_path / "saved")
        child = os.fork()
        if child == 0:
            faults.watch(tmp_path, at, lambda: os._exit(9))
            save(tmp_path / "saved", before + 1)
            os._exit(0)
        os.waitpid(child, 0)
        assert saved(tmp_path / "saved") in (before, before + 1), at
    save(tmp_path / "saved", 100)
    assert saved(tmp_path / "saved") == 100
    assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == [
        "adapter.safetensors",
        "backbone.safetensors",
        "config.json",
    ]


def test_a_first_save_that_fails_leaves_nothing(faults, tmp_path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    faults.watch(tmp_path, 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "saved", 1)
    faults.rest()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": "mine"},
        {"config.json": '{"architectures": ["Other"]}', "model.safetensors": ""},
        {"config.json": "{"},
        {"config.json": "[]"},
    ],
    ids=str,
)
def test_a_folder_that_is_not_ours_is_never_replaced(content, tmp_path):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="exists and is not a saved forecaster"):
        save(tmp_path, 1)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == content


def test_files_that_a_user_added_to_a_save_are_never_deleted(tmp_path):
    save(tmp_path / "saved", 1)
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"'notes\.txt'"):
        save(tmp_path / "saved", 2)
    assert (tmp_path / "saved" / "notes.txt").read_text() == "mine"
    assert saved(tmp_path / "saved") == 1  # and loading does not mind them


def test_a_file_in_the_way_and_a_place_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file exists and is not"):
        save(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="cannot save to"):
        save(tmp_path / "file" / "below", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_stays_a_link(tmp_path):
    save(tmp_path / "there", 1)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    save(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink()
    assert saved(tmp_path / "there") == 2


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("name", ["adapter.safetensors", "backbone.safetensors", "adapter.pt", "config.pkl"])
def test_a_pickle_is_never_executed(name, tmp_path):
    save(tmp_path / "saved", 1)
    content = pickle.dumps(Trap())
    (tmp_path / "saved" / name).write_bytes(content)
    if name.endswith("safetensors"):  # with a checksum that fits, as an attacker would write
        edit(tmp_path / "saved", lambda config: config["files"].update({name: _sha(content)}))
        with pytest.raises(CheckpointError, match=f"{name} is not a safetensors file"):
            read_folder(tmp_path / "saved")
    else:
        assert saved(tmp_path / "saved") == 1


def test_a_config_that_lists_other_files_is_refused(tmp_path):
    save(tmp_path / "saved", 1)
    edit(tmp_path / "saved", lambda config: config["files"].update({"../adapter.safetensors": "0"}))
    with pytest.raises(CheckpointError, match=r"foreign file '\.\./adapter\.safetensors'"):
        read_folder(tmp_path / "saved")


def test_another_format_is_refused_by_its_number(tmp_path):
    save(tmp_path / "saved", 1)
    edit(tmp_path / "saved", lambda config: config.update(format=99))
    with pytest.raises(CheckpointError, match="format 99; this version of dualweaver reads format 1"):
        read_folder(tmp_path / "saved")


def test_a_changed_byte_is_noticed(tmp_path):
    save(tmp_path / "saved", 1)
    file = tmp_path / "saved" / "adapter.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors is truncated or was changed"):
        read_folder(tmp_path / "saved")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_keep_their_type_and_may_share_memory(dtype, tmp_path):
    tensor = torch.ones(3, 4).to(dtype)
    write_folder(tmp_path / "saved", {}, {"x": tensor.T, "again": tensor.T})
    _, found, _ = read_folder(tmp_path / "saved")
    assert torch.equal(found["x"], tensor.T)
    assert found["again"].dtype == dtype


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "saved"
    weaver(max_epochs=1).fit(waves()).save(folder)
    return folder


HUGE = 10**15
EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no columns": lambda config: config.pop("columns"),
    "columns of the wrong type": lambda config: config.update(columns=7),
    "a column that is no label": lambda config: config.update(columns=["a", ["b"], "c"]),
    "columns that repeat": lambda config: config.update(columns=["a", "a", "c"]),
    "more columns than weights": lambda config: config.update(columns=list("abcd")),
    "a target out of range": lambda config: config.update(targets=[0, 1, HUGE]),
    "a target that is text": lambda config: config.update(targets=["a"]),
    "no targets": lambda config: config.update(targets=[]),
    "a huge context": lambda config: config.update(context_length=HUGE),
    "a context of text": lambda config: config.update(context_length="32"),
    "an unknown setting": lambda config: config["settings"].update(colour="red"),
    "a setting out of range": lambda config: config["settings"].update(horizon=-1),
    "an unknown adapter": lambda config: config["settings"].update(adapter="lora"),
    "another adapter": lambda config: config["settings"].update(adapter="adapts"),
    "another adapter that was kept": lambda config: config["adapter"].update(name="adapts"),
    "a backbone that was not fine-tuned": lambda config: config["adapter"].update(fine_tuned=True),
    "an adapter that is no table": lambda config: config.update(adapter="dualweaver"),
    "another fusion": lambda config: config["settings"].update(fusion="cnn"),
    "settings of the wrong type": lambda config: config.update(settings=[1, 2]),
    "a layout of the wrong type": lambda config: config.update(layout="wide"),
    "an unknown index": lambda config: config["index"].update(kind="lunar"),
    "an unknown time unit": lambda config: config["index"].update(unit="fortnight"),
    "a time zone that is none": lambda config: config["index"].update(tz="Mars/Olympus"),
    "more entities than tails": lambda config: config.update(entities=["a", "b"]),
    "no entities": lambda config: config.update(entities=[]),
    "scores of the wrong length": lambda config: config["scores"].update(mse=[1.0]),
    "no backbone": lambda config: config.pop("backbone"),
    "a hash that is a number": lambda config: config["backbone"].update(sha256=5),
    "fine-tuned without weights": lambda config: config["backbone"].update(fine_tuned=True),
    "not a number": lambda config: config["settings"].update(regularisation=math.nan),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_config_that_says_something_else_is_refused_in_one_line(name, fitted, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for file in fitted.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit(folder, EDITS[name])
    with pytest.raises(CheckpointError) as caught:
        DualWeaver.load(folder, backbone=Toy())
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", '"x"', "{}", "[" * 10**5, '{"format": 1}', "\x00"])
def test_a_config_that_is_no_config_is_refused_in_one_line(text, fitted, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        DualWeaver.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_save_killed_between_its_renames_is_found_again(fitted, tmp_path):
    weaver(max_epochs=1).fit(waves()).save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.previous")
    forecast = DualWeaver.load(tmp_path / "saved", backbone=Toy()).predict()
    pd.testing.assert_frame_equal(forecast, DualWeaver.load(fitted, backbone=Toy()).predict())


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
