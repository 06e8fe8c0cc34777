"""The max engine against a real `max serve` on the CPU: the base model only. `make test-max` runs
this.

Outside `make test-servers`, since the first start compiles the model for minutes. Llama, as MAX
26.7 runs Qwen3 on a GPU only.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.backends.local.backend import LocalBackend
from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest
from retrain.inference_engine.max import MAXEngine
from retrain.model.text import LAB_MODEL
from retrain.types import Completion, Row
from tests.real_servers import started

pytestmark = [pytest.mark.max, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the lab's tokenizer, and files as transformers 4 and 5 both read them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=259,
        num_attention_heads=4,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(LAB_MODEL / name, folder)
    for name, more in (
        ("config.json", {"rope_theta": 10000.0}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | more))
    return folder


@pytest.fixture(scope="module")
def learner(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    training = {"temperature": 0.7, "max_tokens": 40}
    sections = {
        "model": {"model": str(model), "lora_rank": 4},
        "backend": {"devices": "cpu"},
        "training": training,
    }
    folder = tmp_path_factory.mktemp("run")
    backend = LocalBackend(
        config_from_mapping(
            sections | {"logging": {"log_dir": str(folder)}, "data": {"source": "lab"}}
        )
    )
    yield backend
    backend.close()


def row_of(prompt: Any, one: Completion) -> Row:
    ids = np.concatenate([prompt, one.token_ids]).astype(np.int32)
    return Row(ids, ((len(prompt), len(ids)),), one.logprobs, 0 * one.logprobs, one.request)


def test_the_base_model_samples_with_raw_log_probs(learner: LocalBackend, model: Path) -> None:
    with started("max", (model, ())) as (server,):
        inference = {"engine": "max", "url": server.url}
        config = learner.config.model_copy(
            update={"inference": learner.config.inference.model_copy(update=inference)}
        )
        base = learner._base
        engine = MAXEngine(config, model=base.model, eos_ids=learner._eos_ids(), device=base.device)
        prompts = [np.arange(40 + k, 60 + 2 * k, dtype=np.int32) for k in range(3)]
        asked = [
            SampleRequest(ids, 4, 40, 0.7, NoiseKey(0, 0, 0, k), adapter_slot=BASE_MODEL)
            for k, ids in enumerate(prompts)
        ]
        drawn, again = list(engine.sample(asked)), list(engine.sample(asked))
        rows = [row_of(prompts[one.request], one) for one in drawn]
        for row, own in zip(rows, learner.logprobs(rows, 1.0), strict=True):
            assert np.abs(row.logprobs - own).max() < 1e-3
        tokens = {(one.request, one.sample): one.token_ids.tolist() for one in drawn}
        assert (
            tokens == {(one.request, one.sample): one.token_ids.tolist() for one in again}
            and len(set(map(str, tokens.values()))) == 12
        )
        with pytest.raises(
            ConfigurationError, match="without adapters, which MAX serves on a GPU only"
        ):
            engine.sync(learner.save_adapter, 0)
        engine.close()
