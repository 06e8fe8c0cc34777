"""Sampler and learner give the log-probs of transformers' own forward pass in float64, past every
window of every family.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from runs import quiet_run
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import BASE_MODEL
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.kv_cache import KVArena, PromptPass
from retrain.model import fused as decoder
from retrain.model.adapter import target_modules
from retrain.model.attention import FusedAttention, _window_mask, attend, refuse_undecodable
from retrain.model.budget import kv_bytes_per_token
from retrain.model.fused import FusedDecoder
from retrain.model.load import choose_deterministic_experts
from retrain.model.text import resolve_model
from tests.marks import first_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from families import _SHAPE, FAMILIES, adapted, compare, compare_padded, tiny_model

FUSED = ("llama", "mistral", "qwen2", "qwen3")
WINDOWED = ("mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", first_of(FAMILIES, quick=12))
def test_sampler_and_learner_compute_the_familys_own_log_probs(family: str) -> None:
    found = compare(family)
    assert found.fused == (family in FUSED)
    assert found.engine < 1e-4 and found.learner < 1e-4


@pytest.mark.parametrize("family", ["gpt_oss", "doge", "nemotron", "deepseek_v3"])
def test_a_family_that_only_a_server_samples_is_scored_and_not_sampled_here(family: str) -> None:
    assert compare_padded(family) < 1e-4
    told = r'engine = "pytorch" cannot decode \w+, which has .*; use .* or engine = "vllm"'
    with pytest.raises(ConfigurationError, match=told):
        refuse_undecodable(tiny_model(family))


@pytest.mark.parametrize("family", ["qwen3", "gemma3n_text", "gemma4_text"])
def test_the_budget_is_what_the_layers_of_a_family_store(family: str) -> None:
    """In the last two some layers read the keys of others, and in the last heads differ in size."""
    model = tiny_model(family)
    decoder = Decoder(model, flash=False)
    with decoder.sampling(BASE_MODEL):
        (state,) = decoder.prefill([np.arange(5, dtype=np.int32)])
    for name, storage in (("auto", None), ("int8", torch.int8)):
        arena = KVArena(4, 10, state, storage)
        stored = sum(one.nbytes for each in arena.keys + arena.values for one in each.tensors)
        assert stored == 4 * 10 * kv_bytes_per_token(model.config, 4, name)


def test_layers_that_peft_refuses_are_one_sentence_and_list_elements_stay() -> None:
    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    shape |= {"head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING["mamba2"](**shape))
    told = r"\[lora\] target_modules: peft does not adapt all of in_proj, out_proj in Mamba2"
    with pytest.raises(ConfigurationError, match=told):
        adapted(model, "mamba2")
    model = tiny_model("gemma3n_text")
    base, _, _ = adapted(model, "gemma3n_text")
    assert not any(name.isdigit() for name in target_modules(base, []))


def test_the_towers_of_a_multimodal_model_are_not_adapted() -> None:
    text = {**_SHAPE, "head_dim": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    seen |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    model = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    _, adapter, _ = adapted(model, "gemma3")
    assert adapter.parameters
    assert all(".language_model.layers." in name for name in adapter.parameters)


def test_a_router_is_adapted_only_where_it_is_named() -> None:
    block = torch.nn.ModuleDict({"router": torch.nn.Linear(2, 2), "down": torch.nn.Linear(2, 2)})
    text_only = SimpleNamespace(config=transformers.LlamaConfig())
    base: Any = SimpleNamespace(decoder=torch.nn.ModuleList([block]), model=text_only)
    assert target_modules(base, []) == ["down"]
    assert target_modules(base, ["router"]) == ["router"]


@pytest.mark.parametrize("family", WINDOWED)
def test_a_fused_forward_without_the_familys_window_is_found_out_and_said(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a probe, as a real one is.
    monkeypatch.setitem(FAMILIES, family, {**FAMILIES[family], "sliding_window": 4096})
    model, lines = tiny_model(family), list[str]()
    assert FusedDecoder.of(model, merge=False, log=lines.append) is not None and not lines

    class Windowless(decoder._Layer):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            self.window = None

    monkeypatch.setattr(decoder, "_Layer", Windowless)
    assert FusedDecoder.of(model, merge=False, log=lines.append) is None
    assert len(lines) == 1 and "keeps its own" in lines[0] and type(model).__name__ in lines[0]
    assert "scale or window" in lines[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_experts_are_computed_without_the_operator_that_has_no_deterministic_form(
    family: str,
) -> None:
    model, ids = tiny_model(family), torch.arange(4, 20).unsqueeze(0)
    before = model(input_ids=ids).logits
    choose_deterministic_experts(model)
    assert family == "qwen3" or model.config._experts_implementation == "eager"
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("gemma4_text", marks=pytest.mark.slow)]
)
def test_a_run_trains_a_family_with_a_plan_of_its_own(tmp_path: Path, family: str) -> None:
    """A torch that knows the shape of a grouped product in bfloat16 alone cannot predict the memory
    of a mixture of experts in float32, and the run goes on.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("lab"))
    sizes = ("vocab_size", "vocab_size_per_layer_input")
    shape = _SHAPE | FAMILIES[family] | dict.fromkeys(sizes, len(tokenizer))
    shape |= dict.fromkeys(("eos_token_id", "bos_token_id"), tokenizer.eos_token_id)
    config = CONFIG_MAPPING[family](**shape | {"max_position_embeddings": 512})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    training = {"max_steps": 1, "max_tokens": 8}
    run = quiet_run(tmp_path / "run", model={"model": str(tmp_path / "model")}, training=training)
    (record,) = run.records()
    assert record.ratio_mean == pytest.approx(1, abs=1e-4)


def test_a_mask_that_a_layer_made_itself_is_refused() -> None:
    one = torch.zeros(1, 2, 1, 8)
    batch = PromptPass([1], FusedAttention())
    window = _window_mask(local_size=3)
    for mask in (torch.zeros(1, 2, 1, 1), window * 1, window.repeat(2, 1, 1, 1), window[0]):
        with pytest.raises(ConfigurationError, match="an attention mask of its own"):
            attend(torch.nn.Linear(1, 1), one, one, one, mask, attention_batch=batch)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("bert-generation", {}), ("gemma3_text", {"use_bidirectional_attention": True})],
)
def test_attention_to_later_tokens_is_not_taken_for_causal(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, FAMILIES.get(family, {}) | settings)
    with pytest.raises(ConfigurationError, match="has an attention mask of its own"):
        refuse_undecodable(tiny_model(family))


@pytest.mark.parametrize("name", ["s_aux", "sinks", "position_bias", "indices", "block_indices"])
def test_what_attention_would_leave_out_is_refused(name: str) -> None:
    one = torch.zeros(1, 2, 1, 8)
    batch = PromptPass([1], FusedAttention())
    with pytest.raises(ConfigurationError, match=f"the attention argument {name}"):
        attend(torch.nn.Linear(1, 1), one, one, one, None, attention_batch=batch, **{name: one})
