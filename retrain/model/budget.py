"""The rows and KV tokens that can decode together in a given amount of memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    from retrain.config.schema import Environment, Evaluation, Training

NO_LIMIT = 1 << 30
"""The context of a model that names none: more tokens than any sequence has."""
PROMPT_ALLOWANCE = 1024
"""Assumed prompt tokens, in addition to max_tokens, in the test whether the longest row fits; also
the assumed tokens of an environment's answers.
"""
_SAMPLING_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Float32 logits handled together: on a CPU they stay in the cache over the passes."""
PREFILL_TOKENS = 8192
"""Prompt tokens of one packed pass; a longer prompt has a pass of its own."""
PAGE_TOKENS = 256
"""Tokens in a page of keys and values: the smallest page that torch's flash kernel reads."""
STORE_SHARE = 8
"""Prompts kept for redraws take at most this part (1/8) of the KV budget on top of it."""
_ROW_CAPS = {"cpu": 64, "cuda": 512}
"""Maximum number of rows. On a CPU they are the rows of a piece; a worker decodes one piece at a
time. Larger pieces would be too few for all workers, and smaller ones take nearly as long. On a GPU
more rows decode no faster, since it waits for the KV cache.
"""
_STORE_ALLOWANCE = 1.25
"""Factor on the keys and values of the rows: the rest holds prompts kept for their groups and for
redraws.
"""
_SCALE_BYTES = 4
_QUANTIZED = ("int8", "fp8")


def sampling_chunk_bytes(device_type: str) -> int:
    """Return the bytes of the float32 logits that a sampler handles together."""
    return _SAMPLING_CHUNK_BYTES.get(device_type, _SAMPLING_CHUNK_BYTES["cpu"])


@dataclass(frozen=True)
class DecodeLimits:
    """The budget of one batch. Contiguous rows reserve the longest completion, so the engine never
    preempts them; pages reserve nothing.
    """

    rows: int
    tokens: int

    def rows_together(self, tokens_per_row: int, completions: int) -> int:
        """Return the number of `completions` that decode together if the longest has
        `tokens_per_row`; the others wait their turn.
        """
        return max(1, min(self.rows, self.tokens // tokens_per_row, completions))


def context_length(model_config: Any) -> int:
    """Return the number of positions that prompt and completion share: max_position_embeddings, or
    with longrope its original length. Past that length, longrope's angles depend on the longest
    sequence of a batch. NO_LIMIT if the model names none.
    """
    text = model_config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", None) or NO_LIMIT)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return most
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return min(most, int(original or most))


def longest_row(
    training: "Training",
    environment: "Environment",
    context: int,
    prompt_tokens: int = PROMPT_ALLOWANCE,
) -> int:
    """Return the tokens of the longest trained prompt and completion. An unknown prompt counts as
    PROMPT_ALLOWANCE tokens, and so do all answers of an environment together. `context` is the
    context length of the model.
    """
    answers = environment.provider not in ("", "reasoning_gym") and environment.max_turns != 1
    wanted = training.max_tokens + prompt_tokens + PROMPT_ALLOWANCE * answers
    return min(wanted, context)


def longest_sampled(
    training: "Training",
    evaluation: "Evaluation",
    environment: "Environment",
    context: int,
    prompt_tokens: int = PROMPT_ALLOWANCE,
) -> int:
    """Return `longest_row` for sampled completions: evaluations may allow longer completions than
    training does.
    """
    longest = longest_row(training, environment, context, prompt_tokens)
    more = most_new_tokens(training, evaluation) - training.max_tokens
    return min(longest + more, context)


def most_new_tokens(training: "Training", evaluation: "Evaluation") -> int:
    """Return the tokens of the longest completion that the run samples."""
    if evaluation.asked_for:
        return max(training.max_tokens, evaluation.over(training).max_tokens)
    return training.max_tokens


def kv_bytes_per_token(model_config: Any, compute_bytes: int, kv_cache_dtype: str = "auto") -> int:
    """Return how many bytes a KV cache holds for each token, by a transformers configuration.
    `compute_bytes` is the size of one number in the model's dtype.

    Raises ConfigurationError for a model that has no attention heads.
    """
    return sum(_kv_bytes_by_layer(model_config, compute_bytes, kv_cache_dtype))


def _kv_bytes_by_layer(model_config: Any, compute_bytes: int, kv_cache_dtype: str) -> list[int]:
    """Return how many bytes each layer with a cache holds for a token. In Gemma 4 the number and
    the size of heads differ by layer. Its last layers read the keys and values of an earlier layer.
    """
    text, found = model_config.get_text_config(), []
    count = text.num_hidden_layers
    # transformers 5.12 has neither.
    layers = getattr(text, "per_layer_config", [text] * count)
    modes = getattr(text, "kv_sharing_modes", [None] * count)
    for layer, mode in zip(layers, modes, strict=True):
        if mode == "reuse":
            continue
        if not hasattr(layer, "num_attention_heads"):
            raise ConfigurationError(
                f"[model] of type {text.model_type} has no attention heads, so retrain cannot"
                " predict its memory; use a dense Llama, Qwen, Gemma, Mistral or Phi model."
            )
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        per_head = {"auto": size * compute_bytes, "bf16": size * 2}.get(
            kv_cache_dtype, size + _SCALE_BYTES
        )
        found.append(2 * heads * per_head)
    return found


def plan_decode(
    model_config: Any,
    *,
    device_type: str,
    memory_bytes: int,
    tokens_per_row: int,
    compute_bytes: int,
    kv_cache_dtype: str = "auto",
    paged: bool = False,
) -> DecodeLimits:
    """Return the budget that fits `memory_bytes`; `tokens_per_row` is the longest prompt and
    completion together.

    In pages as many rows start as there are pages, up to the device's cap, and stored prompts take
    pages too. Raises EnvironmentFailure if not even one row fits. The budget counts the unpacking
    of a quantized cache, one layer at a time.
    """
    per_token = kv_bytes_per_token(model_config, compute_bytes, kv_cache_dtype)
    if kv_cache_dtype in _QUANTIZED:
        per_token += max(_kv_bytes_by_layer(model_config, compute_bytes, "auto"))
    allowance = 1.0 if paged else _STORE_ALLOWANCE
    tokens = int(memory_bytes / (per_token * allowance))
    # Two pages may be full in part: the row's last page, and the last page of its prompt, which the
    # row copies.
    if tokens < tokens_per_row + (2 * PAGE_TOKENS if paged else 0):
        needed = per_token * allowance * tokens_per_row
        raise EnvironmentFailure(
            f"One completion of {tokens_per_row} tokens needs {needed / 2**30:.1f} GiB of KV"
            f" cache, and the budget has {memory_bytes / 2**30:.1f} GiB. Lower [training] or"
            ' [evaluation] max_tokens, or set [inference] kv_cache_dtype = "int8".'
        )
    rows = tokens // (PAGE_TOKENS if paged else tokens_per_row)
    return DecodeLimits(rows=min(_ROW_CAPS.get(device_type, _ROW_CAPS["cpu"]), rows), tokens=tokens)
