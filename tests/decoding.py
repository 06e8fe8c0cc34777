"""Tiny random models of every family, requests to an engine, and what its completions must agree with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.sampling import draw
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.model.truncation import TruncationSettings
from retrain.types import Completion

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


WINDOW = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


FAMILIES = {
    "llama": {},
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, **WINDOW),
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "phi": {},
    "phi3": {"sliding_window": 7},
    "gemma": {"head_dim": 8},
    "gemma2": dict(
        head_dim=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=8,
        **WINDOW,
    ),
    "gemma3_text": dict(head_dim=8, initializer_range=0.1, query_pre_attn_scalar=8, **WINDOW),
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


EOS = (2, 17)


def tiny(family: str = "qwen3", **changes: object) -> PreTrainedModel:
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def with_adapter(model: PreTrainedModel, dropout: float = 0.0) -> torch.nn.Module:
    peft_model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", lora_dropout=dropout)
    )
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return peft_model


def prompts(count: int = 3) -> list[np.ndarray]:
    """Lengths 3, 8, 13, ..."""
    return [
        np.random.default_rng(i).integers(3, 120, 3 + 5 * i).astype(np.int32) for i in range(count)
    ]


def requests(
    count: int = 4, max_tokens: int = 12, temperature: float = 1.0, slot: int = 0, many: int = 3
) -> list[SampleRequest]:
    return [
        SampleRequest(p, count, max_tokens, temperature, NoiseKey(11, 0, 5, i), 0, slot)
        for i, p in enumerate(prompts(many))
    ]


def run(engine: TorchEngine, asked: Sequence[SampleRequest]) -> dict[tuple[int, int], Completion]:
    completions = list(engine.sample(asked))
    by_key = {(one.request, one.sample): one for one in completions}
    assert len(by_key) == len(completions) == sum(request.count for request in asked)
    return by_key


def full_forward(
    model: torch.nn.Module, request: SampleRequest, completion: Completion
) -> torch.Tensor:
    """[T, V] log-probs of softmax(logits / temperature) from one pass over prompt and
    completion.
    """
    ids = np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits = (
            model(input_ids=torch.from_numpy(ids)[None])
            .logits[0, len(request.prompt_ids) - 1 : -1]
            .float()
        )
    return torch.log_softmax(logits / request.temperature, dim=-1)


def assert_agrees(
    model: torch.nn.Module,
    asked: Sequence[SampleRequest],
    got: dict[tuple[int, int], Completion],
    atol: float,
) -> None:
    for (index, _), one in got.items():
        logp = full_forward(model, asked[index], one)
        expected = logp.gather(1, torch.from_numpy(one.token_ids.astype(np.int64))[:, None])[
            :, 0
        ].numpy()
        entropies = -(logp.exp() * logp).sum(-1).numpy()
        np.testing.assert_allclose(one.logprobs, expected, atol=atol, rtol=0)
        np.testing.assert_allclose(one.entropies, entropies, atol=atol, rtol=0)


def assert_near(
    model: torch.nn.Module,
    asked: Sequence[SampleRequest],
    got: dict[tuple[int, int], Completion],
    mean: float,
) -> None:
    """The parity gate's measure for narrow types: mean and maximum (0.5) of the absolute
    differences.
    """
    differences = []
    for (index, _), one in got.items():
        tokens = torch.from_numpy(one.token_ids.astype(np.int64))[:, None]
        differences.append(
            np.abs(
                full_forward(model, asked[index], one).gather(1, tokens)[:, 0].numpy()
                - one.logprobs
            )
        )
    together = np.concatenate(differences)
    assert together.mean() < mean and together.max() < 0.5
    assert together.max() > 1e-4  # otherwise the narrow type was not used


def assert_same(
    one: dict[tuple[int, int], Completion],
    other: dict[tuple[int, int], Completion],
    atol: float = 2e-5,
) -> None:
    assert one.keys() == other.keys()
    for key, completion in one.items():
        np.testing.assert_array_equal(completion.token_ids, other[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, other[key].logprobs, atol=atol, rtol=0)
        assert completion.finish_reason == other[key].finish_reason


class Drawn(NamedTuple):
    tokens: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    kept: np.ndarray


def draws_of(
    logits: torch.Tensor,
    temperatures: np.ndarray,
    uniforms: np.ndarray,
    cuts: TruncationSettings | None = None,
) -> Drawn:
    """[R] each, from `sampling.draw`."""
    given = map(torch.from_numpy, (temperatures, uniforms))
    table = draw(logits, *given, cuts, greedy=bool((temperatures == 0).any()))
    tokens, logprobs, entropies, kept = table.numpy().T
    return Drawn(
        tokens.astype(np.int64), logprobs.astype(np.float32), entropies, kept.astype(np.int64)
    )


def cuts_of(*rows: tuple[int, float, float]) -> TruncationSettings:
    """top_k, top_p and min_p of each row."""
    top_k, *shares = zip(*rows, strict=True)
    wide = (torch.tensor(each, dtype=torch.float64) for each in shares)
    return TruncationSettings(torch.tensor(top_k), *wide)


PAGES = EngineOptions(paged=True, page_tokens=8)


def paged(
    model: torch.nn.Module,
    eos: Sequence[int] = EOS,
    options: EngineOptions = PAGES,
    **settings: Any,
) -> TorchEngine:
    return TorchEngine(model, eos, "cpu", options=options, **settings)
