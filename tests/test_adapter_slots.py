"""Several adapters in one decode batch: every row is sampled as by a model that carries its adapter
alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_models import EOS, model_folder

from retrain.errors import ConfigurationError
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.squeeze.adapter import LoraAdapter, read_adapter
from retrain.types import Completion

ADAPTERS: dict[int, dict[str, Any]] = {
    0: {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    1: {"r": 8, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    2: {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 5},
    },
}
"""By slot. The last leaves layers alone, k and v of a fused projection among them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The adapters as peft saves them."""
    found = {}
    for slot in ADAPTERS:
        found[slot] = tmp_path_factory.mktemp(f"slot{slot}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(slot)
            model = with_adapter("qwen3", slot)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data.normal_(0, 0.3)
        model.save_pretrained(found[slot])
    return found


def with_adapter(family: str, slot: int) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base_model(family), LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[slot]))


def base_model(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)


def carrying(folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model("qwen3"), folder, is_trainable=True)


def request(slot: int, prompt: int) -> SampleRequest:
    ids = (np.arange(4 + 3 * prompt, 9 + 5 * prompt) % 57 + 4).astype(np.int32)
    return SampleRequest(ids, 3, 10, 0.8, NoiseKey(5, 0, 2, prompt), adapter_slot=slot)


def by_sample(
    engine: TorchEngine, requests: list[SampleRequest]
) -> dict[tuple[int, int], Completion]:
    return {(each.request, each.sample): each for each in engine.sample(requests)}


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(model, [EOS], "cpu", **options)


@pytest.mark.parametrize("rows", [128, 4], ids=["all at once", "rows that are taken over"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_row_of_a_mixed_batch_is_sampled_under_its_own_adapter(
    folders: dict[int, Path], merge: bool, rows: int
) -> None:
    from retrain.model.fused import FusedDecoder

    model = carrying(folders[0])
    engine = engine_of(
        model, decode_rows=rows, fused=FusedDecoder.of(model.get_base_model(), merge=merge)
    )
    for slot in (1, 2):
        engine.load_adapter(slot, read_adapter(folders[slot]).layers)
    slots = [2, BASE_MODEL, 0, 1, 2]
    mixed = by_sample(engine, [request(slot, prompt) for prompt, slot in enumerate(slots)])
    assert len(mixed) == 15
    for prompt, slot in enumerate(slots):
        alone = engine_of(base_model("qwen3") if slot == BASE_MODEL else carrying(folders[slot]))
        for (_, sample), expected in by_sample(alone, [request(0, prompt)]).items():
            assert np.array_equal(mixed[prompt, sample].token_ids, expected.token_ids)
            np.testing.assert_allclose(mixed[prompt, sample].logprobs, expected.logprobs, atol=1e-4)


def test_an_adapter_loaded_into_a_slot_replaces_the_one_before(folders: dict[int, Path]) -> None:
    engine = engine_of(carrying(folders[0]))
    answers = []
    for slot in (1, 2, 1):
        engine.load_adapter(7, read_adapter(folders[slot]).layers)
        answers.append(next(iter(engine.sample([request(7, 0)]))).logprobs)
    assert np.array_equal(answers[0], answers[2]) and not np.array_equal(answers[0], answers[1])


def test_what_cannot_be_served_is_said(folders: dict[int, Path]) -> None:
    adapter: LoraAdapter = read_adapter(folders[1])
    engine = engine_of(carrying(folders[0]))
    with pytest.raises(ConfigurationError, match="no adapter in slot 1; it has -1, 0"):
        list(engine.sample([request(1, 0)]))
    with pytest.raises(ConfigurationError, match="Slot 0 is taken"):
        engine.load_adapter(0, adapter.layers)
    with pytest.raises(ConfigurationError, match="Gemma2ForCausalLM"):
        engine_of(base_model("gemma2")).load_adapter(1, adapter.layers)
    first, *_ = adapter.layers
    with pytest.raises(ConfigurationError, match=r"changes lm_head"):
        engine.load_adapter(
            1, [type(first)("lm_head", first.a, first.b, first.alpha, first.use_rslora)]
        )
