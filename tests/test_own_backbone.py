"""docs/backbones.md, followed word by word: a package that adds a backbone, found by its entry point."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT
from safetensors.torch import save_file
from toys import waves

from dualweaver import DualWeaver, load_backbone
from dualweaver.backbones import available_backbones, register_backbone
from dualweaver.errors import SettingError

PAGE = ROOT / "docs" / "backbones.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def install(folder: Path, module: str, code: str, entry_points: str) -> None:
    """As an installer would leave a package."""
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")


@pytest.fixture
def seasonal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = block("toml").splitlines()[1]
    install(tmp_path, "seasonal_backbone", block("python"), f"[dualweaver.backbones]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "seasonal_backbone", raising=False)


@pytest.mark.usefixtures("seasonal")
def test_the_backbone_of_the_page_forecasts_by_its_name(tmp_path: Path) -> None:
    backbone = load_backbone("seasonal")
    days = torch.sin(torch.arange(48.0) * 2 * torch.pi / 24)[None]
    torch.testing.assert_close(backbone.forecast(days, 30).mean[0], days[0, torch.arange(30) % 24], rtol=0, atol=1e-5)
    assert "seasonal" in available_backbones()


@pytest.mark.usefixtures("seasonal")
def test_the_backbone_of_the_page_is_adapted_saved_and_loaded_with_its_weights(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    model = DualWeaver(f"seasonal:{tmp_path}", 24, max_epochs=1, verbose=False).fit(waves(400))
    model.save(tmp_path / "fitted")
    again = DualWeaver.load(tmp_path / "fitted")
    assert again.pipeline_.backbone.state_dict()["weight"] == 0.5
    assert again.predict().equals(model.predict())


def test_a_package_that_cannot_be_imported_is_named_and_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "broken_backbone",
        "raise OSError('no such library')",
        "[dualweaver.backbones]\nbroken = broken_backbone:B\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingError, match=r"'broken' of the package 'broken_backbone'.*no such library"):
        load_backbone("broken")
    with pytest.warns(UserWarning, match="broken_backbone"):
        assert "ttm" in available_backbones()


def test_what_a_package_registers_must_be_a_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "odd_backbone", "B = dict", "[dualweaver.backbones]\nodd = odd_backbone:B\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingError, match=r"no subclass of dualweaver\.backbones\.Backbone"):
        load_backbone("odd")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(SettingError, match="'ttm' is registered already"):
        register_backbone("ttm", type(load_backbone("fracast")))
