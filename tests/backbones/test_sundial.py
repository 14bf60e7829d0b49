"""Sundial: what it promises beyond the recorded numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualweaver.backbones import load_backbone
from dualweaver.backbones.sundial import SundialBackbone, SundialConfig, SundialForPrediction
from dualweaver.errors import CheckpointError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")

PATCH, OUTPUT = 8, 24


def tiny_model(dtype: torch.dtype = torch.float64, dropout: float = 0.1) -> SundialForPrediction:
    torch.manual_seed(0)
    config = SundialConfig(
        input_token_len=PATCH,
        output_token_lens=(OUTPUT,),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        flow_loss_depth=2,
        num_sampling_steps=4,
        diffusion_batch_mul=2,
        dropout_rate=dropout,
        initializer_range=0.2,
    )
    model = SundialForPrediction(config)
    return model.double() if dtype == torch.float64 else model


@pytest.fixture
def backbone() -> SundialBackbone:
    return SundialBackbone(tiny_model(), num_samples=6)


@pytest.fixture
def context() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 5 * PATCH, generator=generator, dtype=torch.float64).cumsum(dim=1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model(torch.float32).save_pretrained(tmp_path / "sundial")
    return tmp_path / "sundial"


def window(context: Tensor, backbone: SundialBackbone) -> Tensor:
    """Labels for `context`."""
    generator = torch.Generator().manual_seed(3)
    future = torch.randn(len(context), backbone.label_horizon(1), generator=generator, dtype=context.dtype)
    return torch.cat([context, future], dim=1)[:, backbone.label_start(context.shape[1]) :]


@pytest.mark.parametrize("gradients", [False, True])
def test_cached_generation_equals_uncached_without_normalisation(gradients: bool, context: Tensor) -> None:
    model = tiny_model().eval()
    noise = list(torch.randn(3, 5 * len(context), OUTPUT, dtype=torch.float64))
    with torch.set_grad_enabled(gradients):
        cached = model.sample(context, 3 * OUTPUT, 5, noise=noise, revin=False)
        grown, blocks = context, []
        for block_noise in noise:
            blocks.append(model.sample(grown, OUTPUT, 5, noise=[block_noise], revin=False))
            grown = torch.cat([grown, blocks[-1].median(dim=1).values], dim=1)
    torch.testing.assert_close(cached, torch.cat(blocks, dim=2), rtol=0, atol=1e-12)


def test_the_frozen_forecast_is_a_deterministic_function(backbone: SundialBackbone, context: Tensor) -> None:
    backbone.train()
    first = backbone(context, 40)
    torch.manual_seed(99)
    torch.testing.assert_close(backbone(context, 40), first, rtol=0, atol=0)


def test_a_series_does_not_depend_on_the_batch_it_is_in(backbone: SundialBackbone, context: Tensor) -> None:
    alone = torch.cat([backbone(row[None], 60) for row in context])
    torch.testing.assert_close(backbone(context, 60), alone, rtol=0, atol=1e-12)
    one_by_one = backbone.forecast(context, 60, batch_size=1, seed=5)
    together = backbone.forecast(context, 60, seed=5)
    torch.testing.assert_close(one_by_one.mean, together.mean, rtol=0, atol=1e-12)


def test_generators_decide_the_samples(backbone: SundialBackbone, context: Tensor) -> None:
    def mean(seed: int) -> Tensor:
        return backbone.distribution(context, 40, generator=torch.Generator().manual_seed(seed)).mean

    torch.testing.assert_close(mean(1), mean(1), rtol=0, atol=0)
    assert not torch.allclose(mean(1), mean(2))


def test_the_same_seed_gives_the_same_noise_in_every_precision(context: Tensor) -> None:
    exact = SundialBackbone(tiny_model())(context, 40)
    single = SundialBackbone(tiny_model(torch.float32))(context.float(), 40)
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)


def test_quantiles_are_those_of_the_samples(backbone: SundialBackbone, context: Tensor) -> None:
    samples, forecast = backbone.sample(context, 40), backbone.distribution(context, 40)
    assert forecast.levels == backbone.quantile_levels
    assert forecast.quantiles is not None
    levels = torch.tensor(forecast.levels, dtype=torch.float64)
    torch.testing.assert_close(forecast.quantiles, torch.quantile(samples, levels, dim=1).permute(1, 2, 0))
    torch.testing.assert_close(forecast.mean, samples.mean(dim=1))
    torch.testing.assert_close(backbone.native(context[:1]), backbone.distribution(context[:1]).quantiles)


def test_gradients_flow_through_every_block_of_a_generation(context: Tensor) -> None:
    backbone = SundialBackbone(tiny_model(), num_samples=3)
    small = context[:2, : 2 * PATCH].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda series: backbone(series, 2 * OUTPUT - 5), (small,))


def test_the_frozen_forecast_gives_gradients_to_the_context_and_none_to_weights(
    backbone: SundialBackbone, context: Tensor
) -> None:
    backbone.forecast(context, 30)  # tables made in inference mode must not break the training that follows
    context[0] = 2.0
    context.requires_grad_()
    backbone(context, 30).square().sum().backward()
    assert context.grad is not None
    assert context.grad.isfinite().all()  # for the constant series as well
    assert (context.grad[1:] != 0).all()
    assert all(weights.grad is None for weights in backbone.parameters())


def test_dropout_is_active_in_fine_tuning_only(backbone: SundialBackbone, context: Tensor) -> None:
    labels = window(context, backbone)

    def loss() -> Tensor:
        return backbone.loss(context, labels, generator=torch.Generator().manual_seed(1))

    backbone.train()
    torch.testing.assert_close(loss(), loss(), rtol=0, atol=0)
    with backbone.unfrozen():
        backbone.train()
        assert not torch.allclose(loss(), loss())
    torch.testing.assert_close(loss(), loss(), rtol=0, atol=0)


def test_losses_of_different_series_can_share_their_draws(backbone: SundialBackbone, context: Tensor) -> None:
    labels = window(context, backbone)
    noise, times = torch.randn(2, 3, 5, OUTPUT, dtype=torch.float64), torch.rand(2, 3, 5, dtype=torch.float64)
    single = backbone.loss(context, labels, horizon=10, noise=noise, times=times)
    assert single.shape == (3, 5)
    double = backbone.loss(
        context.repeat(2, 1),
        labels.repeat(2, 1),
        horizon=10,
        noise=noise.repeat(1, 2, 1, 1),
        times=times.repeat(1, 2, 1),
    )
    torch.testing.assert_close(double, single.repeat(2, 1), rtol=0, atol=1e-12)


def test_losses_under_one_seed_share_their_draws_whatever_the_batch(backbone: SundialBackbone, context: Tensor) -> None:
    labels = window(context, backbone)

    def losses(rows: list[int], seed: int | None = 1) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return backbone.loss(context[rows], labels[rows], horizon=10, generator=generator)

    torch.testing.assert_close(losses([0, 2, 0]), losses([0, 1, 2])[[0, 2, 0]], rtol=0, atol=1e-12)
    assert not torch.allclose(losses([0]), losses([0], seed=2))
    fresh = losses([0, 0], seed=None)  # without a generator every series has draws of its own
    assert not torch.allclose(fresh[0], fresh[1])


def test_surplus_steps_are_cut_from_the_left_in_the_loss(backbone: SundialBackbone, context: Tensor) -> None:
    labels, generator = window(context, backbone), torch.Generator()
    cut = backbone.loss(context[:, 3:], labels[:, 3:], generator=generator.manual_seed(1))
    whole = backbone.loss(context[:, PATCH:], labels[:, PATCH:], generator=generator.manual_seed(1))
    torch.testing.assert_close(cut, whole)
    with pytest.raises(SettingError, match="no whole number of patches"):
        backbone.model.token_loss(context[:, 3:], labels)


def test_bfloat16_weights_forecast_close_to_float32(checkpoint: Path) -> None:
    series = torch.randn(4, 5 * PATCH, generator=torch.Generator().manual_seed(2)).cumsum(dim=1) + 100
    full = SundialBackbone.from_checkpoint(str(checkpoint))(series, 40)
    half = SundialBackbone.from_checkpoint(str(checkpoint), dtype=torch.bfloat16)
    ours = half(series, 40)
    assert half.model.flow_loss.net.input_proj.weight.dtype == torch.bfloat16
    assert ours.dtype == torch.float32
    assert (ours - full).abs().max() < 0.1 * full.std()
    assert half(series.bfloat16(), 40).isfinite().all()


def test_a_configuration_with_foreign_keys_loads_without_running_code(checkpoint: Path) -> None:
    settings = json.loads((checkpoint / "config.json").read_text())
    settings |= {"auto_map": {"AutoModelForCausalLM": "foreign.Foreign"}, "_name_or_path": "somewhere", "rope_theta": 5}
    (checkpoint / "config.json").write_text(json.dumps(settings))
    (checkpoint / "foreign.py").write_text("raise SystemExit('this must not run')")
    loaded = SundialBackbone.from_checkpoint(str(checkpoint), num_samples=3)
    assert not hasattr(loaded.model.config, "auto_map")
    assert loaded.sample(torch.randn(2, 16)).shape == (2, 3, OUTPUT)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["flow_loss.net.cond_embed.bias"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'flow_loss\.net\.cond_embed\.bias' is missing"):
        SundialBackbone.from_checkpoint(str(checkpoint))


def test_a_misshapen_tensor_is_named(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[31\].*\[32\]"):
        SundialBackbone.from_checkpoint(str(checkpoint))


def test_a_sharded_checkpoint_loads(tmp_path: Path, context: Tensor) -> None:
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_backbone(f"sundial:{tmp_path}", context_length=40)
    torch.testing.assert_close(loaded(context.float()), SundialBackbone(model)(context.float()))


def test_sizes_come_from_the_configuration(backbone: SundialBackbone) -> None:
    assert (backbone.min_context, backbone.native_horizon, backbone.context_length) == (PATCH, OUTPUT, 2880)
    assert backbone.label_horizon(5) == OUTPUT
    with pytest.raises(SettingError, match="num_samples=0"):
        SundialBackbone(tiny_model(), num_samples=0)
    with pytest.raises(SettingError, match="noise for 1 blocks"):
        backbone.sample(torch.zeros(1, 16).double(), 40, 2, noise=[torch.zeros(2, OUTPUT)])


def test_the_default_configuration_has_the_published_size() -> None:
    with torch.device("meta"):
        assert sum(weights.numel() for weights in SundialForPrediction(SundialConfig()).parameters()) == 128_329_680
