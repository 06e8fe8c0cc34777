"""Log-probs of sampler and learner, compared with transformers' forward pass in float64, for a tiny
random model of each family.

    python benchmarks/families.py
    python benchmarks/families.py --page docs/models.md

Prompts and completions are longer than every sliding window, every layer has a LoRA adapter, and
the completions of a prompt share its forward pass. The log-prob of every sampled token is compared.
"""

import argparse
import re
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from report import (
    add_output,
    command_line,
    load_average,
    publish,
    table,
    versions_line,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrain.backends.local.learner import Learner
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError, first_line
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.adapter import Adapter
from retrain.model.devices import EngineOptions
from retrain.model.fused import FusedDecoder
from retrain.model.load import BaseModel, decoder_of, find_head
from retrain.types import MachineChoices, Row

_VOCABULARY, _LAYERS, _WINDOW = 61, 4, 12
_TEMPERATURE, _GROUP, _PROMPT_TOKENS, _MAX_TOKENS = 0.7, 3, (25, 40), 24
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": _LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 3, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
_HEAD = {"head_dim": 16}  # wider than hidden_size / heads, where a family lets it be
_SLIDES = {"sliding_window": _WINDOW}
_SOME_SLIDE = {**_SLIDES, "use_sliding_window": True, "max_window_layers": 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_HEAD,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64},
    },
    "mistral": {**_HEAD, **_SLIDES},
    "qwen2": {
        **_HEAD,
        **_SOME_SLIDE,
        "rope_parameters": {**_YARN, "original_max_position_embeddings": 64},
    },
    "qwen3": {**_HEAD, **_SOME_SLIDE, "attention_bias": True},
    "ministral": {**_HEAD, **_SLIDES},
    "gemma": _HEAD,
    "gemma2": {
        **_HEAD,
        **_SLIDES,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {**_HEAD, **_SLIDES, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "phi": {},
    "phi3": _SLIDES,
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
    },
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {**_HEAD, **_SLIDES, "logit_scale": 0.25, "sliding_window_pattern": 2},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": _SLIDES,
    "starcoder2": _SLIDES,
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": _LAYERS, "n_positions": 256},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "smollm3": {**_SOME_SLIDE, "no_rope_layer_interval": 2},
    "exaone4": {**_SLIDES, "sliding_window_pattern": 2},
    "seed_oss": _HEAD,
    "persimmon": {},
    "ernie4_5": _HEAD,
    "nanochat": {},
    "gemma3n_text": {
        **_HEAD,
        **_SLIDES,
        "intermediate_size": [48] * _LAYERS,
        "activation_sparsity_pattern": [0.0] * _LAYERS,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCABULARY,
    },
    "gemma4_text": {
        **_SLIDES,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCABULARY,
    },
    "helium": {"head_dim": 8},
    "glm4": _HEAD,
    "apertus": {},
    "mixtral": {**_SLIDES, "num_local_experts": 4},
    "olmoe": {**_EXPERTS, "clip_qkv": 1.0},
    "arcee": _HEAD,
    "qwen2_moe": {**_SOME_SLIDE, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_HEAD, **_SOME_SLIDE, **_EXPERTS},
}
"""Each family with the settings of its configuration that change the forward pass."""
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
PADDED: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_HEAD, **_SLIDES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "doge": {},
    "nemotron": {},
    "deepseek_v3": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1},
    "mimo_v2_flash": {"head_dim": 8, "v_head_dim": 6},
}
"""Families whose attention ours cannot compute: a server samples, and the learner pads its rows and
leaves attention to the family."""
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": _LAYERS},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": _LAYERS, "rotary_dim": 4},
    "falcon": {},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": _LAYERS, "rotary_dim": 4},
    "jamba": {},
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": _LAYERS},
    "qwen3_next": {},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": _WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv": {},
    "stablelm": {},
}
"""Families that the sampler here refuses: those without pluggable attention, or with a state."""


@dataclass(frozen=True)
class Result:
    fused: bool
    """True if the fused forward pass is used instead of the family's own."""
    windows: str
    """Window and longest row in tokens, as "12 of 64"."""
    tokens: int
    engine: float
    """Largest |log-prob - transformers' in float64| of a sampled token, nats."""
    pages: float | None
    """The same where steps run in fixed buffers over pages, as on a GPU, and draw the same tokens;
    None for a family that never does."""
    learner: float


def tiny_model(family: str) -> Any:
    """Random weights, large enough that attention is far from uniform; norms near 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**{**_SHAPE, **(FAMILIES | PADDED | OTHERS)[family]})
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return model.eval().requires_grad_(False)


_CONFIG = TrainConfig.model_validate(
    {
        "model": {"lora_rank": 2},
        "training": {"temperature": _TEMPERATURE, "max_tokens": _MAX_TOKENS},
    }
)


def adapted(model: Any, family: str) -> tuple[BaseModel, Adapter, np.random.Generator]:
    """The model with an adapter that changes it, and the generator that drew it."""
    decoder = decoder_of(model, family)
    base = BaseModel(
        model, decoder, find_head(model, decoder, family), torch.device("cpu"), torch.float32
    )
    adapter = Adapter(base, _CONFIG.model, _CONFIG.lora, _CONFIG.training.seed)
    rng = np.random.default_rng(5)
    for parameter in adapter.parameters.values():
        parameter.data = torch.from_numpy(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    return base, adapter, rng


def compare_padded(family: str) -> float:
    """Score rows of several lengths with the learner, padded, and with transformers: the largest
    difference in nats.
    """
    model = tiny_model(family)
    base, adapter, rng = adapted(model, family)
    choices = MachineChoices(
        threads=1,
        decode_rows=4,
        decode_tokens=1024,
        micro_batch_tokens=512,
        gradient_checkpointing=False,
    )
    lengths = [
        (prompt, prompt + answer) for prompt in _PROMPT_TOKENS for answer in (5, _MAX_TOKENS)
    ]
    rows = [
        Row(
            rng.integers(4, _VOCABULARY, stop).astype(np.int32),
            ((start, stop),),
            *np.zeros((2, stop - start), np.float32),
            group=group,
        )
        for group, (start, stop) in enumerate(lengths)
    ]
    return largest_difference(
        Learner(base, adapter, _CONFIG, choices).logprobs(rows), reference(model, rows)
    )


def compare(family: str) -> Result:
    """Sample a few completions, and score them with the learner and with transformers."""
    config, device = _CONFIG, torch.device("cpu")
    model = tiny_model(family)
    base, adapter, rng = adapted(model, family)
    fused = FusedDecoder.of(model, merge=True)
    choices = MachineChoices(
        threads=1,
        decode_rows=4,
        decode_tokens=1024,
        micro_batch_tokens=512,
        gradient_checkpointing=False,
    )
    learner = Learner(base, adapter, config, choices, fused)
    prompts = [rng.integers(4, _VOCABULARY, length).astype(np.int32) for length in _PROMPT_TOKENS]
    rows = sample_rows(
        TorchEngine(adapter.peft_model, [3], device, decode_rows=4, fused=fused), prompts
    )
    paged = TorchEngine(
        adapter.peft_model,
        [3],
        device,
        decode_rows=4,
        options=EngineOptions(paged=True, page_tokens=8),
        fused=fused,
    )
    over_pages = sample_rows(paged, prompts) if fused is not None else []
    for row, other in zip(rows, over_pages, strict=bool(over_pages)):
        np.testing.assert_array_equal(row.token_ids, other.token_ids)
    scored = learner.logprobs(rows)
    expected = reference(model, rows)
    return Result(
        fused is not None,
        (
            f"{_WINDOW} of {max(len(row.token_ids) for row in rows)}"
            if "sliding_window" in FAMILIES[family]
            else "none"
        ),
        sum(row.num_actions for row in rows),
        largest_difference([row.logprobs for row in rows], expected),
        largest_difference([row.logprobs for row in over_pages], expected) if over_pages else None,
        largest_difference(scored, expected),
    )


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def sample_rows(engine: TorchEngine, prompts: Sequence[np.ndarray]) -> list[Row]:
    """In the order of request and sample."""
    requests = [
        SampleRequest(prompt, _GROUP, _MAX_TOKENS, _TEMPERATURE, NoiseKey(1, 0, 0, i))
        for i, prompt in enumerate(prompts)
    ]
    rows = []
    for one in sorted(engine.sample(requests), key=lambda one: (one.request, one.sample)):
        prompt = prompts[one.request]
        span = (len(prompt), len(prompt) + len(one.token_ids))
        ids = np.concatenate([prompt, one.token_ids])
        rows.append(
            Row(
                ids,
                (span,),
                one.logprobs,
                np.zeros(len(one.token_ids), np.float32),
                group=one.request,
            )
        )
    return rows


@torch.no_grad()
def reference(model: Any, rows: list[Row]) -> list[np.ndarray]:
    """[T] of each row, by the family's own forward and eager attention in float64, a row at a
    time.
    """
    exact = deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # grouped products have no float64
    found = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()
        logprobs = torch.log_softmax(
            exact(input_ids=ids[None], use_cache=False).logits[0].double() / _TEMPERATURE, -1
        )
        found.append(logprobs[:-1].gather(1, ids[1:, None])[row.spans[0][0] - 1 :, 0].numpy())
    return found


def verdict(family: str) -> tuple[str, str, str, str]:
    """The family's row on the page."""
    if family in FAMILIES:
        found = compare(family)
        forward = "its own forward pass"
        if found.fused:
            forward = "fused"
        return family, forward, "packed", f"{found.engine:.1e}, {found.learner:.1e}"
    try:
        return family, "a server", "padded", f"{compare_padded(family):.1e}"
    except ConfigurationError as error:
        why = first_line(error).partition(" (")[0].removeprefix("[lora] target_modules: ")
        return family, "refused", re.sub(r"\w+ForCausalLM", r"`\g<0>`", why), ""


def write_page(page: Path) -> None:
    """Write what runs, for those who look for their model."""
    rows = [verdict(family) for family in FAMILIES | PADDED | OTHERS]
    page.write_text(
        PAGE.format(
            command=command_line(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            table=table(["family", "sampled by", "learned", "largest difference, nats"], rows),
        ),
        encoding="utf-8",
    )


PAGE = """# Does my model run?

Find your model's family in the table to see how retrain samples and trains it, and how exactly.

| the table says | meaning |
| --- | --- |
| fused, its own forward pass | retrain's fast pass, or transformers' pass, samples in the process of retrain |
| a server | `engine = "pytorch"` refuses the family; a [server](inference-engines.md) may sample it |
| packed, padded | the learner needs no padding, or pads rows and leaves attention to the model |
| refused | the family does not train, for the reason given |
| largest difference | log-probs of the sampler and the learner, or the learner, against transformers in float64 |

Half precision rounds more than these float32 figures. The [parity gate](parity.md) measures your model
before the first step. retrain tries a family that is not here on four tokens before anything else. A
model of text and images, such as Gemma 3 from 4B on, trains on text, without the vision tower.

{table}

The models are tiny, with random weights, a LoRA adapter on every linear layer, and prompts longer than
every sliding window. `{command}` wrote this page
(torch {torch}, transformers {transformers}).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--page", type=Path, help="write docs/models.md instead")
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.page:
        write_page(arguments.page)
        return
    load = load_average()
    lines = []
    for family in arguments.families:
        found = compare(family)
        forward = "fused" if found.fused else "own"
        lines.append([family, forward, found.windows, found.tokens, f"{found.engine:.1e}"])
        lines[-1] += ["" if found.pages is None else f"{found.pages:.1e}", f"{found.learner:.1e}"]
    publish(
        "families",
        f"Log-probs of {len(lines)} model families compared with transformers in float64",
        [
            (
                "Largest difference of a sampled token's log-prob in nats; sampler and learner"
                " compute in float32, with a LoRA adapter "
                "on every linear layer. Over pages the tokens are the same. "
                f"{versions_line({'torch': torch.__version__, 'transformers': transformers.__version__})}."
            ),
            table(
                [
                    "family",
                    "forward pass",
                    "sliding window",
                    "tokens",
                    "sampler",
                    "sampler over pages",
                    "learner",
                ],
                lines,
            ),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main()
