"""The causal decoder that Timer and Sundial share: rotary attention with a cache, SwiGLU, and their stack.

Both models read one series as non-overlapping patches and predict the next patches from each position. They differ
in where the norms sit, in the patch embedding and in the head.

Sources: Timer-XL (arXiv 2410.04803), Sundial (arXiv 2502.00816), rotary positions (arXiv 2104.09864), SwiGLU
(arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from dualweaver.compute.products import Linear
from dualweaver.compute.recompute import recomputable
from dualweaver.errors import CheckpointError

__all__ = ["DecoderConfig", "LayerCache", "PatchDecoder", "rotary_tables", "working_dtype"]

ROTARY_BASE = 10_000.0  # what the checkpoints were trained with, whatever `rope_theta` their configuration holds
TABLE_STEP = 256  # tables are made for a multiple of this many positions, so that few lengths share few tables

# written by other libraries or for other code; none of them changes what is computed here
_IGNORED = ("auto_map", "_name_or_path", "rope_theta", "rope_scaling", "max_position_embeddings", "use_cache")


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision for statistics and tables: float64 for float64, else float32, also beside bfloat16 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class DecoderConfig(PretrainedConfig):
    """Sizes that both models share; the names are those of the published checkpoints."""

    def __init__(
        self,
        input_token_len: int = 96,
        output_token_lens: Sequence[int] = (96,),
        hidden_size: int = 1024,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        if hidden_act != "silu":
            raise CheckpointError(f"hidden_act={hidden_act!r} in the configuration; only 'silu' is known")
        if hidden_size % num_attention_heads or (hidden_size // num_attention_heads) % 2:
            raise CheckpointError(
                f"hidden_size={hidden_size} does not split into {num_attention_heads} heads of even width"
            )
        if not output_token_lens:
            raise CheckpointError("output_token_lens is empty in the configuration")
        self.input_token_len = input_token_len
        self.output_token_lens = list(output_token_lens)
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        super().__init__(**{key: value for key, value in kwargs.items() if key not in _IGNORED})


@lru_cache(maxsize=32)
def _tables(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # normal tensors even when first asked for in inference mode: a later training step saves them for its backward
    with torch.inference_mode(False), torch.no_grad():
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        positions = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, ROTARY_BASE**-exponents).repeat(1, 2)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotary_tables(start: int, length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `start` to `start + length`, each `[length, head_dim]`.

    They are no buffers of a module: a buffer would be rounded by `.to(bfloat16)`, stay at float32 precision through
    `.double()`, and hold no values after a construction on the meta device.
    """
    rows = -(-(start + length) // TABLE_STEP) * TABLE_STEP
    cosines, sines = _tables(rows, head_dim, working_dtype(like.dtype), like.device)
    return cosines[start : start + length], sines[start : start + length]


def _rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (j, j + head_dim / 2) of `[batch, head, token, head_dim]` by their position's angle."""
    cosines, sines = rotary
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat([-second, first], dim=-1) * sines).to(heads.dtype)


class LayerCache:
    """Keys and values of one layer over the tokens seen so far, each `[batch, head, token, head_dim]`.

    Without gradients they live in one buffer that holds the whole generation. With gradients they are concatenated
    instead: a backward pass still needs what a write into a buffer would overwrite.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens; returns all keys and values so far."""
        start, self.length = self.length, self.length + keys.shape[2]
        if torch.is_grad_enabled():
            if self._keys is not None and self._values is not None:
                keys = torch.cat([self._keys[:, :, :start], keys], dim=2)
                values = torch.cat([self._values[:, :, :start], values], dim=2)
            self._keys, self._values = keys, values
            return keys, values
        if self._keys is None or self._values is None:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class CausalAttention(nn.Module):
    """Causal self-attention with rotary positions; queries, keys and values have biases, the output has none."""

    def __init__(self, config: DecoderConfig, dropout: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = dropout
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.o_proj = Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        """`[batch, token, hidden]` to the same, for tokens that follow those in the cache."""
        queries, keys = (_rotate(self._split(proj(hidden)), rotary) for proj in (self.q_proj, self.k_proj))
        values = self._split(self.v_proj(hidden))
        new, past, mask = hidden.shape[1], 0, None
        if cache is not None:
            past = cache.length
            keys, values = cache.extend(keys, values)
        if past and new > 1:
            # is_causal would align the triangle to the first key; each new token sees the whole past and itself
            mask = torch.ones(new, past + new, dtype=torch.bool, device=hidden.device).tril(past)
        return self.o_proj(self.mix(queries, keys, values, mask).transpose(1, 2).flatten(2))

    @recomputable
    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The attention itself; without a mask it is causal from the first key on."""
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and queries.shape[2] == keys.shape[2],
        )

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class SwiGLU(nn.Module):
    """`down(silu(gate(h)) * up(h))`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(hidden), self.up_proj(hidden)))

    @recomputable
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """Attention and SwiGLU with residual sums; the norm comes before each (Sundial) or after each sum (Timer)."""

    def __init__(self, config: DecoderConfig, *, norm_first: bool, dropout: float) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.self_attn = CausalAttention(config, dropout)
        self.ffn_layer = SwiGLU(config.hidden_size, config.intermediate_size)
        self.norm1 = nn.LayerNorm(config.hidden_size)
        self.norm2 = nn.LayerNorm(config.hidden_size)

    @recomputable
    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        total = self.sublayers(hidden, rotary, cache)
        return total if self.norm_first else self.norm2(total)

    @recomputable
    def sublayers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None) -> Tensor:
        """The sum after both; to compute it again takes no more than the products before the last one."""
        return self.feed(self.attend(hidden, rotary, cache))

    @recomputable
    def attend(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None) -> Tensor:
        """The sum after attention."""
        return hidden + self.self_attn(self.norm1(hidden) if self.norm_first else hidden, rotary, cache)

    @recomputable
    def feed(self, total: Tensor) -> Tensor:
        """From the sum after attention to the one after the feed-forward network."""
        if self.norm_first:
            return total + self.ffn_layer(self.norm2(total))
        hidden = self.norm1(total)
        return hidden + self.ffn_layer(hidden)


class PatchDecoder(nn.Module):
    """Patch embedding, decoder layers, final norm: `[batch, token, patch input]` to `[batch, token, hidden]`."""

    def __init__(self, config: DecoderConfig, embedding: nn.Module, *, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.embed_layer = embedding
        self.layers = nn.ModuleList(
            DecoderLayer(config, norm_first=norm_first, dropout=dropout) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)

    def new_caches(self, capacity: int) -> list[LayerCache]:
        """One empty cache a layer, with room for `capacity` tokens."""
        return [LayerCache(capacity) for _ in self.layers]

    def states(self, patches: Tensor, caches: Sequence[LayerCache] | None = None) -> Iterator[Tensor]:
        """The embedding, then the output of every layer; that of the last one after the final norm."""
        hidden = self.embed_layer(patches)
        yield hidden
        start = caches[0].length if caches else 0
        rotary = rotary_tables(start, hidden.shape[1], self.head_dim, hidden)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, caches[index] if caches else None)
            yield self.norm(hidden) if index == len(self.layers) - 1 else hidden

    def forward(self, patches: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        hidden = patches
        for hidden in self.states(patches, caches):  # noqa: B007 - keeps one state alive at a time
            pass
        return hidden
