"""Timer: what it promises beyond the recorded numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualweaver.backbones import load_backbone
from dualweaver.backbones.decoder import rotary_tables
from dualweaver.backbones.timer import TimerBackbone, TimerConfig, TimerForPrediction
from dualweaver.errors import CheckpointError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

PATCH = 12


def tiny_model(outputs: tuple[int, ...] = (PATCH,), dtype: torch.dtype = torch.float64) -> TimerForPrediction:
    torch.manual_seed(0)
    config = TimerConfig(
        input_token_len=PATCH,
        output_token_lens=outputs,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    model = TimerForPrediction(config)
    return model.double() if dtype == torch.float64 else model


@pytest.fixture
def context() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 5 * PATCH, generator=generator, dtype=torch.float64).cumsum(dim=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "timer")
    return tmp_path / "timer"


@pytest.mark.parametrize("outputs", [(PATCH,), (PATCH, 3 * PATCH)])
@pytest.mark.parametrize("gradients", [False, True])
def test_cached_generation_equals_uncached_without_normalisation(
    outputs: tuple[int, ...], gradients: bool, context: Tensor
) -> None:
    model = tiny_model(outputs)
    with torch.set_grad_enabled(gradients):
        cached = model.rollout(context, 100, revin=False)
        uncached = model.rollout(context, 100, revin=False, use_cache=False)
    torch.testing.assert_close(cached, uncached, rtol=0, atol=1e-12)


def test_cached_chunks_of_several_patches_see_each_other_causally(context: Tensor) -> None:
    decoder = tiny_model().model
    patches = context.unfold(1, PATCH, PATCH)
    with torch.no_grad():
        caches = decoder.new_caches(5)
        parts = [decoder(part, caches) for part in patches.split([2, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), decoder(patches), rtol=0, atol=1e-12)


def test_context_rollout_equals_a_forecast_of_the_grown_context(context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model(), rollout="context")
    first = backbone(context, PATCH)
    second = backbone(torch.cat([context, first], dim=1), PATCH)
    torch.testing.assert_close(backbone(context, 2 * PATCH), torch.cat([first, second], dim=1), rtol=0, atol=1e-12)


def test_context_rollout_is_affine_equivariant_over_several_blocks(context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model(), rollout="context")
    moved = backbone(3 * context - 7, 60)
    torch.testing.assert_close(moved, 3 * backbone(context, 60) - 7, rtol=0, atol=1e-10)


def test_gradients_flow_through_every_block_of_a_generation(context: Tensor) -> None:
    model = tiny_model((PATCH, 2 * PATCH))
    small = context[:2, : 2 * PATCH].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda series: model.rollout(series, 40, revin=False), (small,))


@pytest.mark.parametrize("rollout", ["reference", "context"])
def test_the_frozen_forecast_gives_gradients_to_the_context_and_none_to_weights(rollout: str, context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model(), rollout=rollout).train()  # type: ignore[arg-type]
    backbone.forecast(context, 30)  # tables made in inference mode must not break the training that follows
    context.requires_grad_()
    backbone(context, 30).square().sum().backward()
    assert context.grad is not None
    assert context.grad.isfinite().all()
    assert (context.grad != 0).all()
    assert all(weights.grad is None for weights in backbone.parameters())


def test_the_longest_fitting_head_forecasts_each_block() -> None:
    model = tiny_model((PATCH, 3 * PATCH, 2 * PATCH))
    chosen = [model.head_for(limit) for limit in (None, 5, PATCH, 2 * PATCH, 3 * PATCH, 100)]
    assert chosen == [0, 0, 0, 0, 2, 2]


def test_surplus_steps_are_cut_from_the_left(context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model())
    torch.testing.assert_close(backbone(context[:, 5:], 30), backbone(context[:, PATCH:], 30))
    labels = torch.randn(3, 5 * PATCH, dtype=context.dtype)
    torch.testing.assert_close(
        backbone.loss(context[:, 5:], labels[:, 5:]), backbone.loss(context[:, PATCH:], labels[:, PATCH:])
    )


def test_labels_are_the_window_after_the_first_patch(context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model((PATCH, 2 * PATCH)))
    future = torch.randn(3, backbone.label_horizon(1), dtype=context.dtype)
    labels = torch.cat([context, future], dim=1)[:, backbone.label_start(context.shape[1]) :]
    losses = backbone.loss(context, labels)
    assert losses.shape == (3, 5)
    torch.testing.assert_close(backbone.loss(context, torch.cat([labels, future], dim=1)), losses)
    with pytest.raises(SettingError, match="labels hold 71 steps; 5 patches and 24 outputs need 72"):
        backbone.loss(context, labels[:, :-1])


def test_instance_normalised_loss_ignores_scale_and_level(context: Tensor) -> None:
    backbone = TimerBackbone(tiny_model(), instance_norm=True)
    labels = torch.randn(3, 5 * PATCH, dtype=context.dtype)
    torch.testing.assert_close(backbone.loss(context, labels), backbone.loss(5 * context + 2, 5 * labels + 2))


def test_bfloat16_weights_forecast_close_to_float32(checkpoint: Path) -> None:
    series = torch.randn(4, 5 * PATCH, generator=torch.Generator().manual_seed(2)).cumsum(dim=1) + 100
    full = TimerBackbone.from_checkpoint(str(checkpoint))(series, PATCH)
    half = TimerBackbone.from_checkpoint(str(checkpoint), dtype=torch.bfloat16)
    ours = half(series, PATCH)
    assert half.model.lm_heads[0].weight.dtype == torch.bfloat16
    assert ours.dtype == torch.float32  # the level of 100 survives: only the model itself is in low precision
    assert (ours - full).abs().max() < 0.05 * full.std()
    assert half(series.bfloat16(), 30).isfinite().all()


def test_rotary_tables_follow_the_precision_of_the_model() -> None:
    exact, _ = rotary_tables(3, 4, head_dim=8, like=torch.zeros((), dtype=torch.float64))
    low, _ = rotary_tables(3, 4, head_dim=8, like=torch.zeros((), dtype=torch.bfloat16))
    assert exact.shape == low.shape == (4, 8)
    assert (exact.dtype, low.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(exact[:, 0], torch.arange(3, 7, dtype=torch.float64).cos(), rtol=0, atol=1e-15)


def test_a_configuration_with_foreign_keys_loads_without_running_code(checkpoint: Path, context: Tensor) -> None:
    plain = TimerBackbone.from_checkpoint(str(checkpoint))
    settings = json.loads((checkpoint / "config.json").read_text())
    settings |= {
        "auto_map": {"AutoModelForCausalLM": "foreign.Foreign", "AutoConfig": "foreign.Foreign"},
        "_name_or_path": "somewhere",
        "rope_theta": 500,
        "max_position_embeddings": 10000,
        "a_key_of_tomorrow": {"x": 1},
    }
    (checkpoint / "config.json").write_text(json.dumps(settings))
    (checkpoint / "foreign.py").write_text("raise SystemExit('this must not run')")
    loaded = TimerBackbone.from_checkpoint(str(checkpoint))
    assert not hasattr(loaded.model.config, "auto_map")
    torch.testing.assert_close(loaded(context.float(), 30), plain(context.float(), 30), rtol=0, atol=0)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.norm2.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.norm2\.weight' is missing"):
        TimerBackbone.from_checkpoint(str(checkpoint))


def test_a_misshapen_tensor_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_heads.0.weight"] = tensors["lm_heads.0.weight"][:-1].clone()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'lm_heads\.0\.weight' has shape \[11, 32\].*\[12, 32\]"):
        TimerBackbone.from_checkpoint(str(checkpoint))


def test_a_sharded_checkpoint_loads(tmp_path: Path, context: Tensor) -> None:
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_backbone(f"timer:{tmp_path}", context_length=60)
    assert loaded.fingerprint() == TimerBackbone(model).fingerprint()
    torch.testing.assert_close(loaded(context.float()), TimerBackbone(model)(context.float()))


def test_sizes_come_from_the_configuration() -> None:
    backbone = TimerBackbone(tiny_model((PATCH, 3 * PATCH)))
    assert (backbone.min_context, backbone.native_horizon, backbone.context_length) == (PATCH, 3 * PATCH, 2880)
    assert backbone.quantile_levels == ()
    with pytest.raises(SettingError, match="the context has 11 steps"):
        backbone(torch.zeros(1, PATCH - 1, dtype=torch.float64))
    with pytest.raises(SettingError, match="rollout='cached'"):
        TimerBackbone(tiny_model(), rollout="cached")  # type: ignore[arg-type]


def test_configurations_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(CheckpointError, match="hidden_act='gelu'"):
        TimerConfig(hidden_act="gelu")
    with pytest.raises(CheckpointError, match="does not split into 5 heads"):
        TimerConfig(hidden_size=32, num_attention_heads=5)
    with pytest.raises(CheckpointError, match="18 steps is no whole number of patches of 12"):
        TimerBackbone(tiny_model((18,)))


def test_the_default_configuration_has_the_published_size() -> None:
    with torch.device("meta"):
        assert sum(weights.numel() for weights in TimerForPrediction(TimerConfig()).parameters()) == 84_142_080


@pytest.mark.slow
def test_a_model_of_the_published_size_forecasts() -> None:
    backbone = TimerBackbone(TimerForPrediction(TimerConfig()))
    assert backbone.forecast(torch.randn(2, backbone.context_length), 192).mean.shape == (2, 192)


@pytest.mark.slow
def test_a_timer_of_the_real_size_loads_and_forecasts_without_a_second_copy_of_its_weights(tmp_path: Path) -> None:
    TimerForPrediction(TimerConfig()).save_pretrained(tmp_path)
    script = f"""
import resource
import numpy as np, torch
import dualweaver.backbones.timer
from dualweaver import load_backbone
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backbone = load_backbone("timer:{tmp_path}")
assert np.isfinite(backbone.forecast(np.random.randn(7, 2880), 96).mean).all()
weights = sum(parameter.numel() for parameter in backbone.parameters()) * 4 / 1024
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / weights)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3
