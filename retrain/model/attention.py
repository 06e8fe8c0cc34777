"""Our own attention behind transformers' attention interface, so that model definitions run
unpatched.

While the sampler or the learner runs, the model's configuration names the kernel registered here.
Every attention layer then hands its queries, keys and values to `attend`, with the forward's batch.
The batch knows which tokens a query may see. Instead of a mask, transformers passes the width of
the layer's sliding window (`_window_mask`). Shape letters: R rows, Hq query heads, Hk key-value
heads, T queries, L keys, D.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrain.errors import ConfigurationError, first_line
from retrain.model.varlen import (
    PackedKernel,
    PagedKernel,
    fits_flash,
    plain_paged,
)

KERNEL = "retrain"
"""The name under which transformers knows this attention."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_TOKENS = 4
_MASKED_QUERIES = 512
"""Queries per product if a mask is necessary, so that memory stays linear in the sequence."""


class AttentionBatch(Protocol):
    """The tokens in flight, as `attend` needs them; passed to the model's forward as
    `attention_batch`.
    """

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        /,
    ) -> Tensor:
        """Return [B, Hq, T, D] of queries [B, Hq, T, D] over keys and values [B, Hk, L, D]."""
        ...


class AttentionError(ConfigurationError):
    """A layer needs an attention that `attend` does not compute; `reason` names it."""

    def __init__(self, module: nn.Module, reason: str) -> None:
        super().__init__(_undecodable(type(module).__name__, "uses", reason))
        self.reason = reason


def missing(model: Any) -> str:
    """Return the reason why `attend` cannot compute a model's attention; "" if it can.

    The function tries the model on a few tokens: layers outside transformers' attention interface
    would silently compute something else. A state that goes from token to token would go from one
    packed row to the next.
    """
    config = model.config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        return f"layers of type {', '.join(unknown)}"
    if getattr(model, "_is_stateful", False):
        return "layers with a state of their own"
    if getattr(config, "is_encoder_decoder", False) or not getattr(
        model, "_supports_attention_backend", False
    ):
        return "no pluggable attention"
    return _found_by_trying(model)


def refuse_undecodable(model: Any) -> None:
    """Raise ConfigurationError for a model that the pytorch engine cannot sample from."""
    reason = missing(model)
    if reason:
        raise ConfigurationError(_undecodable(type(model).__name__, "has", reason))


def _undecodable(name: str, verb: str, reason: str) -> str:
    return (
        f'[inference] engine = "pytorch" cannot decode {name}, which {verb} {reason}; '
        'use a dense Llama, Qwen, Gemma, Mistral or Phi model, or engine = "vllm".'
    )


_tried: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
"""Results of `_found_by_trying`, by model: a load asks three times."""


def _found_by_trying(model: Any) -> str:
    if model not in _tried:
        weight = model.get_input_embeddings().weight
        ids = torch.arange(min(_PROBE_TOKENS, weight.shape[0]), device=weight.device).unsqueeze(0)
        batch = _Probe()
        reason = ""
        try:
            with torch.no_grad(), plugged_in(model):
                model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids, dtype=torch.bool),
                    attention_batch=batch,
                    use_cache=False,
                )
            if not batch.calls:
                reason = "an attention that is not transformers' interface"
        except AttentionError as error:
            reason = error.reason
        except TypeError as error:
            reason = f"a forward pass that does not hand arguments on ({first_line(error)})"
        _tried[model] = reason
    return _tried[model]


class _Probe:
    """An attention that returns its queries, and counts its calls."""

    calls = 0

    def attention(self, query: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return query


@contextmanager
def plugged_in(model: Any) -> Iterator[None]:
    """Let every attention layer of a transformers model call `attend`; the forward pass inside
    needs `attention_batch=`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(KERNEL, attend)  # doing it twice is harmless
    AttentionMaskInterface.register(KERNEL, _window_mask)
    configs = {
        id(config): config for config in (model.config, model.config.get_text_config())
    }.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = KERNEL
        yield
    finally:
        for config, kernel in zip(configs, before, strict=True):
            config._attn_implementation = kernel


_WINDOW_DTYPE = torch.int8
"""The dtype of no mask of transformers."""


def _window_mask(
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **unused: Any,
) -> Tensor:
    """Return a [1, 1, 1, 1] whose first stride encodes the sliding window. The stride is the
    window's width plus 2, or 2 for no window; 0 means that a window does not describe what a token
    sees. A slice of it (Gemma 4) keeps the stride, and so does a tensor without values. Other
    operations of a layer give a stride of 1 or 0.

    transformers' mask signature: some families (Qwen2-MoE, Phi-MoE) give their window to the mask
    and not to the attention function. A family's own mask function (Gemma 3 for embeddings) sets
    `use_vmap`. If tokens see later tokens (BERT), the caller passes `allow_is_bidirectional_skip`.
    """
    stride = 2 + (local_size or 0)
    if use_vmap or allow_is_bidirectional_skip is not None:
        stride = 0
    size, strides = (1, 1, 1, 1), (stride, 1, 1, 1)
    return torch.empty_strided(size, strides, dtype=_WINDOW_DTYPE, device="cpu")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_batch: AttentionBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return [B, T, Hq, D], by transformers' attention signature. A mask's window goes before
    `sliding_window`, as in transformers' own attention.
    """
    # Refuse arguments that this attention would silently ignore.
    unknown = [
        f"the attention argument {name}"
        for name in ("s_aux", "sinks", "position_bias", "indices", "block_indices")
        if kwargs.get(name) is not None
    ]
    window = sliding_window
    if attention_mask is not None:
        window = -1
        if attention_mask.dtype == _WINDOW_DTYPE:
            window = attention_mask.stride(0) - 2
    if window is not None and window < 0:
        unknown.append("an attention mask of its own")
    if attention_batch is None:
        unknown.append("an attention layer that drops keyword arguments")
    if value.shape[-1] != query.shape[-1]:
        unknown.append(f"values of size {value.shape[-1]} next to keys of size {query.shape[-1]}")
    if attention_batch is None or unknown:
        raise AttentionError(module, unknown[0])
    output = attention_batch.attention(
        query, key, value, scaling or query.shape[-1] ** -0.5, window or None, softcap
    )
    return output.transpose(1, 2).contiguous(), None


class RowLengths:
    """The number of tokens that each row sees, including the token that it decodes now, and their
    masks, which all layers share.
    """

    def __init__(self, lengths: Tensor, longest: int, ragged: bool) -> None:
        self.lengths, self.longest, self._ragged = lengths, longest, ragged
        self._biases: dict[int | None, Tensor | None] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return [R, 1, 1, L], or None where every row sees everything."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._biases:
            bias = None
            if window is not None or self._ragged:
                bias = visible_bias(self.lengths, self.longest, window, dtype)
            self._biases[window] = bias
        return self._biases[window]


class FusedAttention:
    """The two attentions that the engine needs, by PyTorch's fused attention, on every device. A
    soft cap takes plain matrix products, and so does decoding in float32 on a CPU.

    `window` is the number of last tokens that a query sees.
    """

    def __init__(
        self,
        paged: PagedKernel = plain_paged,
        packed: PackedKernel | None = None,
        fits: Callable[[Tensor], bool] = fits_flash,
    ) -> None:
        """`paged`: one query per row over keys and values in pages. `packed`: packed sequences in
        one call, without a soft cap. `fits`: whether `packed` takes queries of this shape and
        dtype.
        """
        self.paged, self._packed, self._fits = paged, packed, fits

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: RowLengths,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with one query per row, [R, Hq, 1, D], over its own tokens of [R, Hk, L, D]. The
        queries of a key-value head lie side by side, so no key repeats.
        """
        count, heads, _, dim = query.shape
        grouped = query.reshape(count, key.shape[1], heads // key.shape[1], dim)
        bias = rows.bias(window, query.dtype)
        if softcap is None and prefers_products(query):
            output = _products(grouped, key, value, bias, scaling)
        else:
            output = _biased(grouped, key, value, bias, scaling, softcap)
        return output.reshape(count, heads, 1, value.shape[-1])

    def causal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return the causal attention of the last T of L tokens, [B, Hq, T, D] over [B, Hk, L, D].
        Query t sees keys 0 .. L - T + t.
        """
        queries, length = query.shape[2], key.shape[2]
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        windowed = window is not None and length > window
        if softcap is None and not windowed and queries == length:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        outputs = []
        before = length - queries  # tokens that every query sees
        for start in range(0, queries, _MASKED_QUERIES):
            stop = min(start + _MASKED_QUERIES, queries)
            lengths = torch.arange(before + start + 1, before + stop + 1, device=query.device)
            # [1, 1, stop - start, before + stop]
            bias = visible_bias(lengths, before + stop, window, query.dtype).permute(1, 2, 0, 3)
            part = query[:, :, start:stop]
            k, v = (tensor[:, :, : before + stop] for tensor in (key, value))
            outputs.append(_biased(part, k, v, bias, scaling, softcap))
        return torch.cat(outputs, dim=2)

    def packed_kernel(self, query: Tensor, softcap: float | None) -> PackedKernel | None:
        """Return one function for packed sequences of any lengths, if there is one for queries [..,
        D] of this dtype.
        """
        if softcap is None and self._fits(query):
            return self._packed
        return None


def prefers_products(query: Tensor) -> bool:
    """Return True if matrix products score these queries faster than the fused kernel, where the
    rows are short or the queries few.

    Without values, in a prediction of memory, it does not matter: both ways keep about the same.
    """
    return query.device.type in ("cpu", "meta") and query.dtype == torch.float32


def _products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
) -> Tensor:
    """Return softmax(scaling * q k + bias) v of queries [R, Hk, G, D]; without gradient."""
    rows, heads = query.shape[:2]
    queries, keys, values = (tensor.flatten(0, 1) for tensor in (query, key, value))
    keys = keys.transpose(1, 2)
    if bias is None:
        scores = torch.bmm(queries * scaling, keys)
    else:
        scores = torch.baddbmm(
            bias.expand(rows, heads, 1, -1).flatten(0, 1), queries, keys, alpha=scaling
        )
    return torch.bmm(torch.softmax(scores, dim=-1), values).view(rows, heads, -1, value.shape[-1])


def visible_bias(lengths: Tensor, longest: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return [R, 1, 1, L] additive mask: row r sees its tokens 0 .. lengths[r] - 1, only the last
    `window` of them if given.
    """
    position = torch.arange(longest, device=lengths.device)
    hidden = position >= lengths[:, None]
    if window is not None:
        hidden |= position < (lengths - window)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=lengths.device).masked_fill_(
        hidden, float("-inf")
    )[:, None, None]


def _biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Return softmax(scaling * q k + bias) v. A soft cap replaces scaling * q k by softcap *
    tanh(scaling * q k / softcap), as in Gemma 2. The soft cap has no fused kernel on a CPU.

    It avoids in-place operations, since the learner differentiates it.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * (scaling / softcap)) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)
