"""Saved forecasters and resume folders: nothing in them runs, and nothing is made in a size that they merely claim."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from killed import bits, killed, model
from safetensors.torch import load_file, save_file
from toys import Toy, refusal, waves, weaver
from traps import HEADERS, cheap_refusal, edit, traps

from dualweaver import DualWeaver
from dualweaver.fit.resume import ResumeFolder

pytestmark = pytest.mark.usefixtures("one_thread")


# Saved forecasters


@pytest.fixture(scope="module")
def forecasters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    weaver(max_epochs=1).fit(waves()).save(folder / "adapter")
    weaver(max_epochs=1, adapter="fine-tune", learning_rate=1e-3).fit(waves()).save(folder / "backbone")
    return folder


@pytest.fixture(params=["adapter", "backbone"])
def saved(request: pytest.FixtureRequest, forecasters: Path, tmp_path: Path) -> tuple[Path, str]:
    """A saved folder, and its file of weights to be replaced."""
    return shutil.copytree(forecasters / request.param, tmp_path / "saved"), f"{request.param}.safetensors"


def replace(folder: Path, file: str, content: bytes) -> None:
    """With a checksum that fits, as somebody with intent would write it."""
    (folder / file).write_bytes(content)
    files = json.loads((folder / "config.json").read_text())["files"]
    edit(folder / "config.json", files=files | {file: hashlib.sha256(content).hexdigest()})


def test_pickles_in_a_saved_forecaster_never_run(saved, sprung, tmp_path):
    folder, file = saved
    for content in traps(sprung, tmp_path):
        for beside in ("adapter.pt", "config.pkl", "backbone.bin", "pytorch_model.bin"):
            (folder / beside).write_bytes(content)
        DualWeaver.load(folder, backbone=Toy())
    for content in traps(sprung, tmp_path):
        replace(folder, file, content)
        assert file in refusal(DualWeaver.load, folder)
    (folder / "config.json").write_bytes(traps(sprung, tmp_path)[0])
    assert "config.json" in refusal(DualWeaver.load, folder)


@pytest.mark.parametrize("kind", HEADERS)
def test_sizes_that_a_saved_forecaster_announces_are_not_believed(kind, saved):
    folder, file = saved
    replace(folder, file, HEADERS[kind])
    assert file in cheap_refusal(DualWeaver.load, folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_saved_weights_of_another_type_are_refused_by_name(dtype, saved, tmp_path):
    folder, file = saved
    weights = load_file(folder / file)
    first = min(name for name in weights if name.startswith(("adapter.", "module.")))
    save_file(weights | {first: weights[first].to(dtype)}, tmp_path / "changed")
    replace(folder, file, (tmp_path / "changed").read_bytes())
    with pytest.raises(ValueError, match=rf"{first.removeprefix('adapter.')}' in .*{file} is {dtype}; expected"):
        DualWeaver.load(folder, backbone=Toy())


# Resume folders


@pytest.mark.parametrize("kind", ["epoch", "done"])
def test_pickles_in_a_resume_folder_never_run(kind, sprung, tmp_path):
    folder = tmp_path / "resume"
    expected = bits(model().fit(waves(), resume=folder))
    if kind == "epoch":
        shutil.rmtree(folder)
        killed(folder, 20)
    identity = json.dumps(json.loads((folder / "resume.json").read_text()), sort_keys=True).encode()
    files = list(folder.glob("*.pt"))
    for content in traps(sprung, tmp_path):
        for number, file in enumerate(files):  # a checksum that does not fit, then one that does
            file.unlink()
            files[number] = file.with_name(f"{file.name.split('.')[0]}.{file.name.split('.')[1]}.{'0' * 16}.pt")
            files[number].write_bytes(content)
        with pytest.warns(UserWarning, match="passed over"):
            assert bits(model().fit(waves(), resume=copied(folder, tmp_path))) == expected
        checksum = hashlib.sha256(identity + b"dualweaver" + content).hexdigest()[:16]
        for number, file in enumerate(files):
            files[number] = file.rename(file.with_name(file.name.replace("0" * 16, checksum)))
        message = refusal(model().fit, waves(), resume=copied(folder, tmp_path))
        assert "is no checkpoint of tensors and plain values" in message


def copied(folder: Path, beside: Path) -> Path:
    shutil.rmtree(beside / "copy", ignore_errors=True)
    return shutil.copytree(folder, beside / "copy")


def test_the_description_of_a_resume_folder_is_read_as_text(sprung, tmp_path):
    for content in traps(sprung, tmp_path):
        folder = ResumeFolder(tmp_path / "resume", ["a"])
        folder.path.mkdir(exist_ok=True)
        (folder.path / "resume.json").write_bytes(content)
        assert "resume.json cannot be read" in refusal(folder.claim, {"seed": 0})
