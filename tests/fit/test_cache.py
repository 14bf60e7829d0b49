"""What the untouched model gave is kept for later fits where a folder is named, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from toy_backbones import NormalisedToy
from toys import CONTEXT, HORIZON, Toy, waves, weaver

from dualweaver import DualWeaver
from dualweaver.adapters import DualWeaverAdapter
from dualweaver.fit.cache import VARIABLE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the untouched model: losses by window, forecasts by call."""
    told: list[str] = []
    reference_loss, distribution = DualWeaverAdapter.reference_loss, NormalisedToy.distribution

    def counted_loss(self: DualWeaverAdapter, *args: Any) -> Tensor:
        told.extend(["loss"] * len(args[1]))
        return reference_loss(self, *args)

    def counted_forecast(self: NormalisedToy, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        told.append("forecast")
        return distribution(self, context, *args, **kwargs)

    monkeypatch.setattr(DualWeaverAdapter, "reference_loss", counted_loss)
    monkeypatch.setattr(NormalisedToy, "distribution", counted_forecast)
    return told


def fit(seed_of_weights: int = 0, df: Any = None, **settings: Any) -> DualWeaver:
    backbone = NormalisedToy(CONTEXT, HORIZON, levels=(0.1, 0.5, 0.9), seed=seed_of_weights)
    return weaver(backbone, **{"objective": "paper", **settings}).fit(waves() if df is None else df)


def test_a_second_fit_computes_nothing_of_the_untouched_model_again(folder: Path, computed: list[str]) -> None:
    first = fit()
    assert computed.count("loss") > 0
    assert computed.count("forecast") == 2  # of the untouched model and of the adapted one
    computed.clear()
    second = fit()
    assert computed == ["forecast"]
    pd.testing.assert_frame_equal(second.history_, first.history_)
    pd.testing.assert_frame_equal(second.scores_, first.scores_)
    pd.testing.assert_frame_equal(second.predict(level=[80]), first.predict(level=[80]))
    assert len(list(folder.iterdir())) == 2


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"seed_of_weights": 1},
    "values": {"df": waves(seed=1)},
    "rows": {"df": waves(420)},
    "horizon": {"horizon": 5},
    "targets": {"targets": ["a", "c"]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_data_or_settings_are_another_key(
    name: str, folder: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit()
    found = fit(**OTHERS[name])
    assert len(list(folder.iterdir())) == 4
    monkeypatch.delenv(VARIABLE)
    pd.testing.assert_frame_equal(found.history_, fit(**OTHERS[name]).history_)


def test_windows_that_an_earlier_fit_has_not_seen_are_added(folder: Path, computed: list[str]) -> None:
    fit(window_stride=4, max_epochs=1)
    few = computed.count("loss")
    computed.clear()
    fit(window_stride=1, max_epochs=1)
    assert computed.count("loss") > 2 * few
    computed.clear()
    fit(window_stride=4, max_epochs=1)
    assert computed == ["forecast"]
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_file_is_computed_again_with_a_notice(folder: Path, computed: list[str]) -> None:
    expected = fit()
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    computed.clear()
    with pytest.warns(UserWarning, match="is damaged: what it held is computed again"):
        found = fit()
    assert computed.count("loss") > 0
    pd.testing.assert_frame_equal(found.history_, expected.history_)
    computed.clear()
    fit()
    assert computed == ["forecast"]
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_no_fit(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="nothing is kept for later fits"):
        found = fit()
    assert np.isfinite(found.predict().to_numpy()).all()


def test_nothing_is_kept_of_a_module_of_ones_own(folder: Path) -> None:
    weaver(Toy(), objective="paper").fit(waves())
    assert not folder.exists()


def test_without_a_folder_nothing_is_kept(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    fit()
    losses = computed.count("loss")
    fit()
    assert computed.count("loss") == 2 * losses
    assert torch.is_grad_enabled()
