"""TinyTimeMixer against the recorded forecasts of the public checkpoint, and its published zero-shot errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from golden import load
from places import TTM_WEIGHTS, needs_ttm_weights
from safetensors.torch import load_file, save_file
from small_backbones import tiny_ttm

from dualweaver.backbones import load_backbone
from dualweaver.data.splits import protocol_segments
from dualweaver.data.windows import WindowDataset, window_starts
from dualweaver.errors import CheckpointError, SettingError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_ttm().save_pretrained(tmp_path / "ttm")
    return tmp_path / "ttm"


@needs_ttm_weights
@pytest.mark.parametrize(("mode", "dtype"), [("f32", torch.float32), ("f64", torch.float64)])
def test_forecasts_and_gradients_equal_the_recorded_ones(mode: str, dtype: torch.dtype) -> None:
    recorded = load("ttm_r2_512_96", "golden.safetensors")
    backbone = load_backbone(f"ttm:{TTM_WEIGHTS}", dtype=dtype)
    context = recorded[f"context_{mode}"].to(dtype).requires_grad_()
    forecast = backbone(context)
    weights = torch.linspace(-1, 1, forecast.numel(), dtype=dtype).view_as(forecast)
    (forecast * weights).sum().backward()
    exact = mode == "f64"
    torch.testing.assert_close(forecast, recorded[f"forecast_{mode}"], rtol=0, atol=1e-9 if exact else 1e-5)
    torch.testing.assert_close(context.grad, recorded[f"grad_{mode}"], rtol=0, atol=1e-9 if exact else 4e-5)


@needs_ttm_weights
@pytest.mark.parametrize(
    ("name", "rule", "stride", "expected"),
    [
        ("ETTh1", "ett-hour", 1, 0.3628),
        pytest.param("ETTh2", "ett-hour", 1, 0.2757, marks=pytest.mark.slow),
        pytest.param("ETTm1", "ett-minute", 4, 0.3381, marks=pytest.mark.slow),
        pytest.param("ETTm2", "ett-minute", 4, 0.1767, marks=pytest.mark.slow),
        pytest.param("Weather", "ratio", 8, 0.1502, marks=pytest.mark.slow),
    ],
)
def test_zero_shot_errors_are_those_published(
    benchmark: Callable[[str], pd.DataFrame], name: str, rule: str, stride: int, expected: float
) -> None:
    backbone = load_backbone(f"ttm:{TTM_WEIGHTS}")
    test = torch.as_tensor(protocol_segments(benchmark(name), rule, 512).test, dtype=torch.float32)
    starts = torch.arange(0, len(test) - 607, stride)  # the published subsets count from the first window
    windows = WindowDataset(test, starts, 608)
    total = 0.0
    for chunk in torch.arange(len(windows)).split(64):
        batch = windows.__getitems__(chunk.tolist()).transpose(1, 2).flatten(0, 1)
        forecast = backbone.forecast(batch[:, :512]).mean
        total += (forecast - batch[:, 512:]).square().mean(dim=1).sum().item()
    assert len(window_starts([len(test)], 608)) == len(test) - 607
    assert total / (len(windows) * test.shape[1]) == pytest.approx(expected, abs=5e-4)


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    model = tiny_ttm()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    x = torch.randn(3, 32)
    torch.testing.assert_close(load_backbone(f"ttm:{tmp_path}")(x), model(x), rtol=0, atol=1e-6)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["head.base_forecast_block.bias"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"head\.base_forecast_block\.bias.*missing"):
        load_backbone(f"ttm:{checkpoint}")


def test_a_misshapen_tensor_is_named(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["decoder.adapter.weight"] = torch.zeros(3, 3)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"decoder\.adapter\.weight"):
        load_backbone(f"ttm:{checkpoint}")


def test_a_truncated_file_is_refused_by_name(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="ttm"):
        load_backbone(f"ttm:{checkpoint}")


def test_another_models_checkpoint_is_refused(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("tinytimemixer", "bert"))
    with pytest.raises(CheckpointError, match="'bert'"):
        load_backbone(f"ttm:{checkpoint}")


def test_weights_in_pickle_are_not_read(checkpoint: Path) -> None:
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load_backbone(f"ttm:{checkpoint}")


def test_settings_that_are_not_implemented_are_refused() -> None:
    with pytest.raises(CheckpointError, match="mode='mix_channel'"):
        tiny_ttm(mode="mix_channel")


def test_another_context_length_than_the_checkpoints_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SettingError, match="exactly 32 steps"):
        load_backbone(f"ttm:{checkpoint}", context_length=64)


def test_an_unreachable_hub_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="give a local directory"):
        load_backbone("ttm:nobody/no-such-model")
