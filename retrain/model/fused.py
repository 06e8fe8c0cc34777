"""The forward pass of a dense decoder (Llama, Qwen 2 and 3, Mistral) over the parameters of a
transformers model.

It replaces the model's own forward in the sampler and in the learner: fewer and larger operations,
the same function. A test on a few tokens, with the sliding window of each layer, checks that it is
the same. A model that fails the test keeps its own forward. Shape letters: B rows, T tokens of a
row, N = B T, H hidden size, Hq and Hk heads, D head size.
"""

from collections.abc import Callable
from itertools import chain
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain.model.attention import AttentionBatch, FusedAttention, plugged_in
from retrain.model.functions import (
    Norm,
    apply_rope,
    gated_mlp,
    norm_project,
    normed,
    project,
    recomputed,
)
from retrain.model.packed import PackedWeight
from retrain.model.projection import Projection, fusable

_FAMILIES = {"llama", "qwen2", "qwen3", "mistral"}
_WINDOW_IN_CONFIG = {"mistral"}
"""Families whose attention reads the sliding window from its configuration. In other families the
attention has its own window, or none.
"""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Largest deviation of a layer's hidden states on a probe, relative to a token's norm."""
_PROBE_TOKENS = 16

Rotary = tuple[Tensor, Tensor]
"""cos and sin [N, 1, D] of N positions."""


class Cache(Protocol):
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values [B, Hk, T, D]; returns all that its queries attend
        to.
        """
        ...


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        place = attention.config if attention.config.model_type in _WINDOW_IN_CONFIG else attention
        self.window: int | None = getattr(place, "sliding_window", None)
        self.attention_norm = Norm.of(layer.input_layernorm)
        self.mlp_norm = Norm.of(layer.post_attention_layernorm)
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = Projection([attention.o_proj])
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self.down = Projection([mlp.down_proj])
        self.heads = [outputs // self.head_size for outputs in self.qkv.outputs]
        self.head_norm: Norm | None = None
        """The norms of query and key heads as one: row i of its weight [Hq + Hk, D] is for head i.
        It is None if the family has no such norms.
        """
        self._norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        if None not in self._norms:
            self.head_norm = Norm(self._joined_norms(), self._norms[0].variance_epsilon)

    def _joined_norms(self) -> Tensor:
        own = [
            norm.weight.detach().expand(count, -1)
            for norm, count in zip(self._norms, self.heads[:2], strict=True)
        ]
        return torch.cat(own)

    def refresh(self, *, copy: bool) -> None:
        """Follow the weights and the adapter; `copy` as in `Projection.refresh`."""
        if self.head_norm is not None:
            self.head_norm.weight.copy_(self._joined_norms())
        for projection in self.projections:
            projection.refresh(copy=copy)

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.output, self.gate_up, self.down]

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary,
        rows: int,
        batch: AttentionBatch,
        cache: Cache | None,
        number: int,
    ) -> Tensor:
        """Return the residual stream [N, H] after the layer."""
        qkv = norm_project(hidden, self.attention_norm, self.qkv)
        fused = qkv.view(len(hidden), -1, self.head_size)  # [N, Hq + 2 Hk, D]
        heads, shared, _ = self.heads
        parts = (
            apply_rope(fused[:, : heads + shared], *rotary, self.head_norm),
            fused[:, heads + shared :],
        )
        rotated, values = (part.view(rows, -1, *part.shape[1:]).transpose(1, 2) for part in parts)
        # [B, Hq, T, D], and [B, Hk, T, D] as the values are.
        queries, keys = rotated[:, :heads], rotated[:, heads:]
        if cache is not None:
            keys, values = cache.update(keys, values, number)
        attended = batch.attention(queries, keys, values, self.scaling, self.window, None)
        hidden = hidden + project(attended.transpose(1, 2).reshape(len(hidden), -1), self.output)
        return hidden + gated_mlp(hidden, self.mlp_norm, self.gate_up, self.down)


class FusedDecoder:
    """Maps token ids to last hidden states, with the parameters of the given model."""

    def __init__(self, model: Any, merge: bool) -> None:
        """`model` is a causal language model of transformers. Raises AttributeError for a model
        with another structure.

        `merge`: a sampler may hold a second copy of the weights, with the adapter in it.
        """
        decoder = model.base_model if model.base_model is not model else model.model
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._norm = Norm.of(decoder.norm)
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._projections = list(chain.from_iterable(layer.projections for layer in self._layers))
        self._head: Any = model.get_output_embeddings()
        adapters = chain.from_iterable(projection.parameters for projection in self._projections)
        self._adapters = list(adapters)
        self._parameters = self._adapters or list(model.parameters())
        self.layout_seconds = 0.0
        """Seconds that `refresh` has taken where something had changed."""
        self.merge = merge
        self._packed_head: PackedWeight | None = None
        """The prepacked head, while a sampler reads it."""
        self._version: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, model: Any, *, merge: bool, log: Callable[[str], None] = lambda _: None
    ) -> "FusedDecoder | None":
        """Return None if the model has another family, quantized layers or other adapters, or if a
        probe differs.

        `log` receives a line where a model of a known family differs on the probe.
        """
        if model.config.model_type not in _FAMILIES or model.config.hidden_act != "silu":
            return None
        linears = (
            getattr(part, f"{name}_proj")
            for layer in model.base_model.layers
            for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")))
            for name in names
        )
        if not all(map(fusable, linears)):
            return None
        fused = cls(model, merge)
        difference = fused._difference(model)
        if difference:
            log(
                f"{type(model).__name__} keeps its own, slower forward pass: the fused one differs"
                f" from it on a probe {difference}."
            )
            return None
        return fused

    @property
    def adapter_copy_bytes(self) -> int:
        """Bytes of the adapter in the dtype and layout of the products, after `refresh`."""
        factors = chain.from_iterable(each.factors or () for each in self._projections)
        return sum(factor.nbytes for factor in factors)

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of a copy of the frozen layers, without columns for an adapter."""
        return sum(projection.weight.nbytes for projection in self._projections)

    def refresh(self, *, sampling: bool = False) -> None:
        """Follow the adapter, or without one the weights, for the learner or for products without
        gradient; costs nothing while neither has changed.
        """
        copy = sampling and self.merge
        version = (
            copy,
            *((parameter.data_ptr(), parameter._version) for parameter in self._parameters),
        )
        if version == self._version:
            return
        start = monotonic()
        for layer in self._layers:
            layer.refresh(copy=copy)
        if not copy or not self._adapters:
            self._packed_head = None
        if copy and self._packed_head is None and type(self._head) is nn.Linear:
            self._packed_head = PackedWeight(self._head.weight, self._head.bias)
        self._version = version
        self.layout_seconds += monotonic() - start

    @property
    def kv_heads(self) -> list[tuple[int, int]]:
        """(key-value heads, head size), layer by layer."""
        return [(layer.heads[1], layer.head_size) for layer in self._layers]

    @torch.no_grad()
    def rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [length, D] of positions 0 .. length - 1, in a sequence of that
        length.
        """
        like = self._embed.weight[:1, None]
        cos, sin = self._rotary(like, torch.arange(length, device=like.device)[None])
        return cos[0], sin[0]

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor | Rotary,
        batch: AttentionBatch,
        *,
        cache: Cache | None = None,
        checkpointed: bool = False,
    ) -> Tensor:
        """Return the last [B, T, H] of ids and positions [B, T], or of their cos and sin.

        `checkpointed` keeps only the residual stream between layers for the backward pass.
        """
        rows = len(token_ids)
        hidden, rotary = self._embedded(token_ids, positions)
        for number, layer in enumerate(self._layers):
            if checkpointed:
                hidden = recomputed(layer.forward, hidden, rotary, rows, batch, None, number)
            else:
                hidden = layer.forward(hidden, rotary, rows, batch, cache, number)
        return normed(hidden, self._norm).view(rows, -1, hidden.shape[-1])

    def _embedded(self, token_ids: Tensor, positions: Tensor | Rotary) -> tuple[Tensor, Rotary]:
        """Return the residual stream [N, H], cos and sin [N, 1, D]."""
        embedded = self._embed(token_ids)
        if isinstance(positions, Tensor):
            cos, sin = self._rotary(embedded, positions)
            positions = cos.flatten(0, 1).unsqueeze(1), sin.flatten(0, 1).unsqueeze(1)
        return embedded.flatten(0, 1), positions

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., V] of hidden states [..., H]."""
        if self._packed_head is not None:
            return self._packed_head.product(hidden)
        return self._head(hidden)  # type: ignore[no-any-return]  # the library returns Any

    @torch.no_grad()
    def _difference(self, model: Any) -> str:
        """Say how it differs from the model's own layers on a probe; "" if it does not, and for a
        model without weights.

        Each layer gets the model's own input: over many layers in half precision two roundings of
        one function drift far apart.
        """
        if self._embed.weight.is_meta:
            return ""
        decoder = model.base_model
        count = min(_PROBE_TOKENS, self._embed.num_embeddings)
        ids = torch.arange(count, device=self._embed.weight.device).unsqueeze(0)
        seen: list[tuple[Tensor, Tensor]] = []
        hooks = [
            layer.register_forward_hook(
                lambda _, inputs, output: seen.append((inputs[0][0], output[0]))
            )
            for layer in decoder.layers
        ]
        own, theirs = _Causal(), _Causal()
        asked = {"attention_mask": torch.ones_like(ids, dtype=torch.bool), "use_cache": False}
        try:
            with plugged_in(model):
                last = decoder(input_ids=ids, attention_batch=theirs, **asked).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        # `refresh` writes the adapter's factors for the first time.
        self.refresh()
        embedded, rotary = self._embedded(ids, torch.arange(count, device=ids.device).unsqueeze(0))
        differences = [
            _distance(embedded, seen[0][0]),
            _distance(normed(seen[-1][1], self._norm), last),
        ]
        for layer, (before, after) in zip(self._layers, seen, strict=True):
            found = layer.forward(before, rotary, 1, own, None, 0)
            differences.append(_distance(found, after))
        if own.asked != theirs.asked:
            return "in its attention's scale or window"
        rounding = max(differences) / _TOLERANCE[last.dtype]
        return f"by {rounding:.1e} times what rounding allows" if rounding > 1 else ""


class _Causal(FusedAttention):
    """Causal attention within each row, as an `AttentionBatch` that records each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float | None, ...]] = []

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.asked.append((scaling, window, softcap))
        return self.causal(query, key, value, scaling, window, softcap)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest ||found - expected|| / ||expected|| of a token; both [N, H]. A padding
    token's embedding may be zero, in both.
    """
    found, expected = found.float(), expected.float()
    size = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - expected).norm(dim=-1) / size).max())
