"""`[inference]` on the PyTorch engine: what works, what is refused in which sentence, and the
budget that fits the memory.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen3Config

from retrain.config.schema import Inference
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.kv_cache import KVArena, PromptState
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.budget import kv_bytes_per_token, plan_decode
from retrain.model.devices import EngineOptions, attention_of, engine_options
from retrain.model.varlen import flash
from retrain.noise import uniform
from tests.decoding import PAGES, run, tiny


def options_for(
    device_type: str = "cpu", model_dtype: torch.dtype = torch.float32, **keys: object
) -> EngineOptions:
    return engine_options(Inference.model_validate(keys), device_type, model_dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_kernel": "flash"}, 'attention_kernel = "flash" needs a CUDA device, and this'),
        ({"attention_kernel": "flash", "device_type": "cuda"}, "computes in bf16"),
        ({"attention_kernel": "triton"}, 'engine = "vllm" has them'),
        ({"attention_kernel": "tk", "device_type": "cuda"}, "ThunderKittens"),
        ({"attention_kernel": "cutlass"}, 'attention_kernel = "cutlass" needs a CUDA device'),
        ({"dtype": "fp8"}, 'engine = "vllm" with a fp8 model'),
        ({"dtype": "fp4", "device_type": "cuda"}, "4-bit matrix products"),
        ({"kv_cache_dtype": "fp8", "device_type": "mps"}, "8-bit floats"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(changes: dict, words: str):
    with pytest.raises(ConfigurationError) as refusal:
        options_for(**changes)
    message = str(refusal.value)
    assert words in message and message.startswith("[inference] ") and message.endswith(".")
    assert "\n" not in message


def test_a_gpu_attends_with_torchs_flash_kernel_or_flash_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    assert options_for("cuda", torch.bfloat16).flash
    assert options_for("cuda", torch.bfloat16, attention_kernel="flash").flash
    assert not options_for("cuda", torch.bfloat16, attention_kernel="cutlass").flash
    assert not options_for("cuda", torch.float32).flash and not options_for().flash
    assert attention_of("default", "cuda", torch.bfloat16)._packed is flash
    for settings in (("cutlass", "cuda", torch.bfloat16), ("default", "cpu", torch.float32)):
        assert attention_of(*settings)._packed is None
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda query: query
    )  # a torch whose kernel has no windows
    assert not options_for("cuda", torch.bfloat16).flash
    with pytest.raises(EnvironmentFailure, match=r"needs torch 2\.11"):
        options_for("cuda", torch.bfloat16, attention_kernel="flash")


def test_what_equals_the_model_needs_no_copy_and_no_conversion():
    options = options_for(model_dtype=torch.bfloat16, dtype="bf16", kv_cache_dtype="bf16")
    assert (options.weights, options.kv_storage) == (None, None)
    options = options_for(dtype="bf16", kv_cache_dtype="int8")
    assert (options.weights, options.kv_storage) == (torch.bfloat16, torch.int8)


def test_the_budget_is_what_the_cache_takes():
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    like = PromptState(
        np.zeros(5, dtype=np.int32),
        [torch.zeros(2, 5, 8)] * 3,
        [torch.zeros(2, 5, 8)] * 3,
        torch.zeros(50),
    )
    for name, storage in (
        ("auto", None),
        ("bf16", torch.bfloat16),
        ("int8", torch.int8),
        ("fp8", torch.float8_e4m3fn),
    ):
        arena = KVArena(4, 10, like, storage)
        allocated = sum(
            tensor.nbytes for stored in arena.keys + arena.values for tensor in stored.tensors
        )
        assert allocated == 4 * 10 * kv_bytes_per_token(config, 4, name)
    plan = plan_decode(
        config, device_type="cpu", memory_bytes=10_000_000, tokens_per_row=500, compute_bytes=4
    )
    assert plan.rows * 500 <= plan.tokens
    assert plan.tokens * kv_bytes_per_token(config, 4) <= 10_000_000
    with pytest.raises(EnvironmentFailure, match=r"Lower \[training\] or"):
        plan_decode(
            config, device_type="cpu", memory_bytes=1000, tokens_per_row=500, compute_bytes=4
        )


def test_a_model_without_attention_is_refused_where_its_cache_is_counted():
    config = CONFIG_MAPPING["mamba"](hidden_size=16, num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match="type mamba has no attention heads"):
        kv_bytes_per_token(config, 4)


def test_a_grown_and_compacted_arena_keeps_every_token():
    like = PromptState(
        np.zeros(3, dtype=np.int32), [torch.randn(2, 3, 4)], [torch.randn(2, 3, 4)], torch.zeros(9)
    )
    arena = KVArena(3, 3, like, None)
    arena.write_prompt([0, 1, 2], like)
    arena.reserve(4, 20, 3, 3)
    new = torch.randn(3, 2, 4)
    arena.keys[0].append(arena.keys[0].places(torch.tensor([3, 3, 3])), new)
    arena.move([2], [0], 4)
    kept = arena.keys[0].read(2, 4)
    assert torch.equal(kept[0, :, :3], like.keys[0]) and torch.equal(kept[0, :, 3], new[2])
    assert torch.equal(kept[1, :, 3], new[1])


@pytest.mark.parametrize("options", [EngineOptions(), PAGES], ids=["rows", "pages"])
def test_every_draw_uses_the_noise_of_its_own_coordinates(options: EngineOptions):
    """Rows start at different times, move, and pass the block of precomputed positions; none
    borrows another's uniform. With equal logits a token says its uniform.
    """
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    asked = [
        SampleRequest(
            np.full(2 + i, 5, np.int32), 2, 40 + 45 * (i % 3), 1.0, NoiseKey(9 + i % 2, i, 4, 7 + i)
        )
        for i in range(5)
    ]
    asked[4] = replace(asked[4], first_position=70)
    engine = TorchEngine(model, [], "cpu", decode_rows=3, options=options)
    for (index, sample), one in run(engine, asked).items():
        request, key = asked[index], asked[index].noise
        places = np.arange(request.max_tokens) + request.first_position
        expected = uniform(key.seed, key.stream, key.step, key.prompt, sample, places)
        assert one.token_ids.tolist() == (np.ceil(expected * 120) - 1).tolist()
