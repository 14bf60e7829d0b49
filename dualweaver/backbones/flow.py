"""Sundial's head: a flow-matching network that turns noise into a forecast, given the state of a position.

The network sees a mixture of noise and forecast, `t * target + (1 - t) * noise`, and predicts the target itself;
target minus noise is then the velocity along which the mixture moves from t = 0 to t = 1.

Sources: Sundial (arXiv 2502.00816), flow matching (arXiv 2210.02747), adaptive layer norm (arXiv 2212.09748).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualweaver.backbones.decoder import working_dtype
from dualweaver.compute.products import Linear
from dualweaver.compute.recompute import recomputable

__all__ = ["FlowMatching", "FlowNetwork", "sinusoids"]

TIME_WIDTH = 256
TIME_SCALE = 1000.0  # t in [0, 1] becomes [0, 1000], the range that sinusoids of diffusion models are made for


def sinusoids(times: Tensor, width: int = TIME_WIDTH) -> Tensor:
    """Cosines, then sines, of the times at geometric frequencies: `[...]` to `[..., width]`."""
    times = times.to(working_dtype(times.dtype))
    exponents = torch.arange(width // 2, dtype=times.dtype, device=times.device) / (width // 2)
    angles = times[..., None] * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbedding(nn.Module):
    """Sinusoids and a small network: `[...]` to `[..., hidden]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(TIME_WIDTH, width), nn.SiLU(), Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        return self.mlp(sinusoids(times).to(next(self.mlp.parameters()).dtype))


class ResidualBlock(nn.Module):
    """`x + gate * mlp(norm(x) * (1 + scale) + shift)`, with shift, scale and gate from the conditioning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(Linear(width, width), nn.SiLU(), Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, 3 * width))

    @recomputable
    def forward(self, hidden: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(conditioning).chunk(3, dim=-1)
        return hidden + gate * self.mlp(self.in_ln(hidden) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    """Modulated norm without weights of its own, then a linear map to the forecast."""

    def __init__(self, width: int, output: int) -> None:
        super().__init__()
        self.linear = Linear(width, output)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(width, 2 * width))

    def forward(self, hidden: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(conditioning).chunk(2, dim=-1)
        normal = F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6)
        return self.linear(normal * (1 + scale) + shift)


class FlowNetwork(nn.Module):
    """Predicts the clean forecast from a noisy one, its time and the state of its position."""

    def __init__(self, output: int, width: int, depth: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = Linear(width, width)
        self.input_proj = Linear(output, width)
        self.res_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, output)

    def forward(self, noisy: Tensor, times: Tensor, state: Tensor) -> Tensor:
        """`noisy [..., output]`, `times [...]` in [0, 1000] and `state [..., hidden]` to `[..., output]`."""
        return self.denoise(noisy, times, self.cond_embed(state))

    @recomputable
    def denoise(self, noisy: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """As `forward`, with the state embedded already.

        Leading axes broadcast: all that depends on time and state alone is computed once for the samples that share
        them.
        """
        conditioning = self.time_embed(times) + condition
        hidden = self.input_proj(noisy.to(self.input_proj.weight.dtype))
        for block in self.res_blocks:
            hidden = block(hidden, conditioning)
        return self.final_layer(hidden, conditioning)


class FlowMatching(nn.Module):
    """Training loss and sampling of the flow network."""

    def __init__(self, output: int, width: int, depth: int) -> None:
        super().__init__()
        self.net = FlowNetwork(output, width, depth)

    def loss(self, states: Tensor, targets: Tensor, noise: Tensor, times: Tensor, pred_len: int) -> Tensor:
        """Squared error of the predicted target, step i of the output weighted by 1/i: `[batch, token]`.

        Args:
            states: `[batch, token, hidden]`.
            targets: `[batch, token, output]`.
            noise: `[copy, batch, token, output]`; the loss is averaged over the copies. A batch of 1 is shared.
            times: `[copy, batch, token]`, in [0, 1]; likewise.
            pred_len: steps of the output that count.
        """
        mix = times[..., None]
        noisy = mix * targets + (1 - mix) * noise
        predicted = self.net(noisy, times * TIME_SCALE, states)[..., :pred_len].to(targets.dtype)
        errors = (predicted - targets[..., :pred_len]).square()
        weights = 1 / torch.arange(1, errors.shape[-1] + 1, dtype=errors.dtype, device=errors.device)
        return (errors * weights).mean(dim=-1).mean(dim=0)

    def sample(self, states: Tensor, noise: Tensor, steps: int) -> Tensor:
        """Move the noise to forecasts in equal steps of time.

        Args:
            states: `[batch, hidden]`.
            noise: `[batch, sample, output]`, or `[1, sample, output]` for noise that all series share.
            steps: evaluations of the network.
        """
        condition = self.net.cond_embed(states)[:, None]
        times = torch.arange(steps, dtype=noise.dtype, device=noise.device) * (TIME_SCALE / steps)
        noisy = noise.expand(states.shape[0], -1, -1)
        for time in times:
            predicted = self.net.denoise(noisy, time, condition).to(noise.dtype)
            noisy = noisy + (predicted - noise) / steps
        return noisy
