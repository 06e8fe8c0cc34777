"""`[model] dtype = "fp8"`: sampler and learner compute with the same 8-bit weights, exactly as with
what these stand for.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import small

from retrain import train
from retrain.backends.local.backend import LocalBackend
from retrain.backends.local.learner import Learner
from retrain.config import TrainConfig
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.devices import EngineOptions
from retrain.model.footprint import footprint
from retrain.model.memory import predict_memory
from retrain.model.packed import FLOAT8, Float8Linear, dequantised, hold_layers_in_float8, quantised
from retrain.types import Row
from tests.decoding import PAGES
from tests.learner_models import (
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    with_logprobs,
)

FP8: dict[str, Any] = {"model": {"dtype": "fp8"}}


def held_in_float8(learner: Learner) -> dict[str, Float8Linear]:
    return {
        name: module
        for name, module in learner.base.model.named_modules()
        if isinstance(module, Float8Linear)
    }


def widened(family: str) -> Learner:
    """A learner of which every layer has, in float32, the weights that the 8 bits stand for."""
    learner = make_learner(config_for(family), fused=False)
    modules = dict(learner.base.model.named_modules())
    for name, narrow in held_in_float8(make_learner(config_for(family, **FP8))).items():
        modules[name].weight.data = dequantised(narrow.weight, narrow.scale)
    return learner


def test_a_weight_is_within_a_rounding_and_its_scale_is_exact_in_bfloat16() -> None:
    """Rows of every size, a row of zeros, one whose largest is the format's own, and one just
    above.
    """
    weight = (
        torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-8, 6, 40)[:, None]
    )
    weight[3] = 0
    weight[5, 0], weight[5, 1:] = 448.0, 1.0
    weight[6, 0], weight[6, 1:] = 449.0, 1.0
    values, scale = quantised(weight)
    wide = dequantised(values, scale)
    assert values.dtype == FLOAT8 and torch.equal(
        torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)
    )
    assert [float(scale[row]) for row in (3, 5, 6)] == [1.0, 1.0, 2.0] and not wide[3].any()
    smallest = scale * 2.0**-9  # the spacing of the smallest numbers
    assert ((wide - weight).abs() <= torch.maximum(weight.abs() * 2.0**-4, smallest / 2)).all()
    assert torch.equal(dequantised(values, scale.bfloat16()).float(), wide)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "opt"])
def test_log_probs_and_gradients_are_those_of_the_widened_weights(family: str) -> None:
    """Of the fused forward and of the model's own; biases, tied and untied heads."""
    narrow, wide = make_learner(config_for(family, **FP8)), widened(family)
    rows = with_logprobs(make_rows(), wide.logprobs(make_rows()), 0.3)
    for found, expected in zip(narrow.logprobs(rows), wide.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-5)
    narrow.train(rows, 0)
    wide.train(rows, 0)
    assert distance(gradients(narrow), gradients(wide)) < 1e-5
    plain = make_learner(config_for(family))
    plain.train(rows, 0)
    assert distance(gradients(narrow), gradients(plain)) > 1e-3, "the 8 bits were used"


def test_blocks_are_narrow_and_embeddings_head_norms_and_adapter_are_not() -> None:
    learner = make_learner(config_for("llama", **FP8))
    narrow = {
        name
        for name, parameter in learner.base.model.named_parameters()
        if parameter.dtype == FLOAT8
    }
    assert len(narrow) == 2 * 7 and all(
        ".layers." in name and name.endswith("proj.base_layer.weight") for name in narrow
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_backward_pass_keeps_no_widened_weight(family: str) -> None:
    """The footprint counts what autograd keeps, parameters aside."""
    sizes = [footprint(learner.base, learner_config) for learner, learner_config in _pair(family)]
    assert sizes[0].kept_per_token == sizes[1].kept_per_token


def _pair(family: str) -> list[tuple[Learner, TrainConfig]]:
    return [
        (make_learner(config), config) for config in (config_for(family), config_for(family, **FP8))
    ]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("options", [EngineOptions(), PAGES], ids=["rows", "pages"])
def test_sampler_and_learner_are_one_policy(merge: bool, options: EngineOptions) -> None:
    learner = make_learner(config_for(**FP8), merge=merge)
    engine = TorchEngine(
        learner.adapter.peft_model, [3], "cpu", options=options, fused=learner._fused
    )
    prompt = np.arange(4, 15, dtype=np.int32)
    drawn = list(engine.sample([SampleRequest(prompt, 4, 20, 0.7, NoiseKey(1, 0, 0, 0))]))
    rows = [
        Row(
            np.concatenate([prompt, one.token_ids]),
            ((11, 11 + len(one.token_ids)),),
            one.logprobs,
            one.logprobs,
            group=0,
            sample=one.sample,
        )
        for one in drawn
    ]
    for row, own in zip(rows, learner.logprobs(rows), strict=True):
        np.testing.assert_allclose(row.logprobs, own, atol=1e-4)


def test_memory_is_predicted_with_the_layers_that_are_wide_at_a_time(tmp_path: Path) -> None:
    plain, config = predict_memory(small(tmp_path)), small(tmp_path, **FP8)
    backend, predicted = LocalBackend(config), predict_memory(config)
    assert (
        predicted.size == footprint(backend._base, config) and predicted.choices == backend.choices
    )
    narrow = [
        module for module in backend._base.model.modules() if isinstance(module, Float8Linear)
    ]
    saved = sum(3 * module.weight.numel() - 4 * module.out_features for module in narrow)
    assert plain.weights.bytes - predicted.weights.bytes == saved - 3 * 4 * max(
        module.weight.numel() for module in narrow
    )
    assert (
        predicted.merged_copy.bytes == plain.merged_copy.bytes
        and "8 bits" in predicted.weights.note
    )


@pytest.mark.slow
def test_a_run_passes_the_gate_and_resumes_byte_for_byte(tmp_path: Path) -> None:
    train(small(tmp_path / "whole", training={"max_steps": 2, "save_every": 1}, **FP8))
    train(small(tmp_path / "parted", training={"max_steps": 1, "save_every": 1}, **FP8))
    train(
        small(
            tmp_path / "parted",
            training={"max_steps": 2, "save_every": 1},
            resume={"from": str(tmp_path / "parted")},
            **FP8,
        )
    )
    one, other = (
        next((tmp_path / name).rglob("final/adapter_model.safetensors")).read_bytes()
        for name in ("whole", "parted")
    )
    assert one == other


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"inference": {"engine": "vllm"}}, 'engine = "vllm"'),
        ({"inference": {"dtype": "bf16"}}, "inference. dtype"),
        ({"model": {"load_in_4bit": True}}, "load_in_4bit"),
        ({"backend": {"shard_base": True}}, "shard_base"),
    ],
)
def test_what_would_not_read_the_same_weights_is_refused(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=f'model. dtype = "fp8".*{words}'):
        small(tmp_path, **{"model": FP8["model"] | sections.pop("model", {}), **sections})


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20))
    with pytest.raises(ConfigurationError, match=r'"gpt2" have none; use "auto"'):
        hold_layers_in_float8(model.base_model, "gpt2")
