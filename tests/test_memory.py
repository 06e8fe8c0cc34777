"""What is predicted of a run's memory without its weights, against the tensors of the run
itself.
"""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from runs import small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrain.backends.local.backend import LocalBackend
from retrain.backends.local.micro_batches import LearnerRow
from retrain.config import TrainConfig
from retrain.config.overrides import deep_merge
from retrain.errors import EnvironmentFailure
from retrain.model.budget import (
    NO_LIMIT,
    PROMPT_ALLOWANCE,
    context_length,
    longest_row,
    longest_sampled,
)
from retrain.model.footprint import footprint
from retrain.model.machine import Budget, Machine, plan
from retrain.model.memory import GIB, Memory, Part, predict_memory
from retrain.model.text import load_model_config, resolve_model
from retrain.system import total_memory
from retrain.types import Row
from tests.marks import first_of
from tests.runs import small_run

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
}


def qwen(folder: Path, layers: int = 36, **sections: dict[str, Any]) -> TrainConfig:
    """The standard profile on a model of which only the configuration is there."""
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | {"num_hidden_layers": layers}))
    standard: dict[str, Any] = {
        "model": {"model": str(folder), "lora_rank": 32},
        "training": {"batch_size": 8, "group_size": 16, "max_tokens": 10240},
        "backend": {"devices": "gpu:0"},
    }
    return small(folder / "run", **deep_merge(standard, sections))


def part(memory: Memory, name: str) -> Part:
    (found,) = [one for one in memory.parts if one.name == name]
    return found


def rows(count: int, prompt: int, actions: int) -> list[Row]:
    """Rows of different prompts, so that none is shared."""
    generator = np.random.default_rng(0)
    return [
        Row(
            token_ids=generator.integers(0, 200, prompt + actions).astype(np.int32),
            spans=((prompt, prompt + actions),),
            logprobs=np.full(actions, -1.0, np.float32),
            advantages=np.ones(actions, np.float32),
            group=number,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "sections",
    [{}, {"lora": {"dropout": 0.1}}, {"model": {"dtype": "bf16"}}],
    ids=["fp32", "dropout", "bf16"],
)
def test_a_model_without_weights_has_the_footprint_and_the_choices_of_the_real_one(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = small(tmp_path, **sections)
    backend, predicted = LocalBackend(config), predict_memory(config)
    assert predicted.size == footprint(backend._base, config)
    assert predicted.choices == backend.choices
    assert predicted.device == backend.device_name


def test_a_dialogue_has_room_for_what_its_environment_says() -> None:
    """Where there can be a second reply, memory is predicted for longer rows, within the model's
    context.
    """

    def longest(max_tokens: int = 64, **environment: Any) -> int:
        training = {"max_tokens": max_tokens}
        sections = {"model": {"model": "lab"}, "training": training, "environment": environment}
        config = TrainConfig.model_validate(sections)
        context = context_length(load_model_config(resolve_model(config.model.model)))
        return longest_row(config.training, config.environment, context, 100)

    for one in ({}, {"provider": "reasoning_gym", "id": "a"}, {"provider": "a.B", "max_turns": 1}):
        assert longest(**one) == 164
    for several in ({"provider": "a.B"}, {"provider": "a.B", "max_turns": 3}):
        assert longest(**several) == 164 + PROMPT_ALLOWANCE
    assert longest(1500) == 1600 and longest(1500, provider="my.Mine") == 2048


def test_what_evaluations_sample_may_be_longer_than_what_is_trained(tmp_path: Path) -> None:
    """Decoding has room for it where the run evaluates, and the learner is planned for what it
    trains.
    """

    def planned(**evaluation: Any) -> tuple[int, int, str]:
        config = small(tmp_path, evaluation=evaluation)
        predicted = predict_memory(config)
        asked = (config.training, config.evaluation, config.environment)
        longest = longest_sampled(*asked, context=NO_LIMIT, prompt_tokens=100)
        return (
            longest - config.training.max_tokens,
            part(predicted, "learning pass").bytes,
            part(predicted, "KV cache").note,
        )

    training = small(tmp_path).training.max_tokens
    unread, read = (
        planned(every=0, at_start=False, at_end=False, max_tokens=3 * training),
        planned(every=1, max_tokens=3 * training),
    )
    assert (unread[0], read[0]) == (100, 100 + 2 * training)
    assert unread[1] == read[1] and unread[2] != read[2]


def test_the_parts_that_stay_are_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    config = small(tmp_path)
    backend, predicted = LocalBackend(config), predict_memory(config)
    backend.train(rows(2, 5, 7), 0)
    frozen = [p for p in backend._base.model.parameters() if not p.requires_grad]
    trained = list(backend._learner.optimizer.parameters.values())
    states = backend._learner.optimizer._adamw.state.values()
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    fused = backend._fused
    assert fused is not None
    projections = fused._projections
    assert not any(p.copy for p in projections)
    copies = sum(factor.nbytes for p in projections for factor in p.factors or ())
    assert part(predicted, "weights").bytes == sum(p.nbytes for p in frozen)
    gradients = [p.grad for p in trained if p.grad is not None]
    state = sum(each.nbytes for each in (*trained, *gradients, *moments))
    assert part(predicted, "trained").bytes == state + copies
    fused.refresh(sampling=True)
    copies = [one for one in (fused._packed_head, *(p.copy for p in projections)) if one]
    size = 4 * sum(copy._weight.numel() for copy in copies)
    assert part(predicted, "sampler copy").bytes == size > 0


@pytest.mark.parametrize(
    "sections", [{}, {"lora": {"dropout": 0.1}}], ids=["fused", "the model's own"]
)
def test_activations_are_what_a_forward_pass_of_the_learner_keeps(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = small(tmp_path, **sections)
    backend = LocalBackend(config)
    learner, kept = backend._learner, {}
    micro = _micro_batch(backend, 8)
    parameters = {p.untyped_storage().data_ptr() for p in backend._base.model.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        learner._training(micro, 0),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
    ):
        hidden = learner._hidden_states(micro)
    assert hidden.requires_grad
    tokens = micro.token_ids.numel()
    per_token = footprint(backend._base, config).kept_per_token
    assert sum(kept.values()) == pytest.approx(tokens * per_token, rel=0.05)


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations make: alive now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if id(storage) not in given | self._known:
                self._known.add(id(storage))
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return result

    def _free(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.alive -= size


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", first_of(["fp32", "bf16"]))
def test_a_learning_pass_takes_what_is_predicted_for_its_tokens(
    tmp_path: Path, checkpointing: bool, dtype: str
) -> None:
    config = small(
        tmp_path, model={"dtype": dtype}, training={"gradient_checkpointing": checkpointing}
    )
    predicted = predict_memory(config)
    backend, size = LocalBackend(config, predicted.choices), predicted.size
    backend.train(rows(1, 5, 7), 0)
    peaks = [_peak_of_pass(backend, count) for count in (4, 8)]
    per_token = size.activations_per_token(checkpointing=checkpointing) + size.gradients_per_token
    assert (peaks[1] - peaks[0]) / 400 == pytest.approx(per_token, rel=0.15)


def _peak_of_pass(backend: LocalBackend, count: int) -> int:
    """Bytes at most while a gradient is computed of so many rows of 100 tokens, their head
    aside.
    """
    learner, micro = backend._learner, _micro_batch(backend, count)
    with learner._training(micro, 0), Allocations() as allocations:
        learner._hidden_states(micro).sum().backward()  # type: ignore[no-untyped-call]
    return allocations.peak


def _micro_batch(backend: LocalBackend, count: int) -> Any:
    """So many rows of 100 tokens."""
    learner_rows = [
        LearnerRow(number, row, row.logprobs, row.logprobs)
        for number, row in enumerate(rows(count, 40, 60))
    ]
    (piece,) = backend._learner._pieces(learner_rows, share=False)
    return backend._learner._micro_batch(piece)


def test_the_probe_leaves_no_tensor_behind(tmp_path: Path) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())

    config = small(tmp_path)
    base = LocalBackend(config)._base
    footprint(base, config)
    before = alive()
    footprint(base, config)
    assert alive() == before


PROFILE_ROWS = [2, 7, 40, 76]
"""Completions of 11,264 tokens that decode together on 16, 24, 80 and 141 GiB."""


def test_the_standard_profile_of_a_4b_model(tmp_path: Path) -> None:
    """66,060,288 adapter parameters at rank 32, and 147 KB of keys and values a token."""
    config = qwen(tmp_path)
    predicted = predict_memory(config, memory_gib=24)
    assert predicted.size.num_trainable == 66_060_288
    page = Path(__file__).parents[1] / "docs/getting-started.md"
    assert "rank 32 has 66,060,288 parameters, over all seven projections" in page.read_text()
    assert part(predicted, "weights").bytes == 2 * 4_022_468_096
    size = predicted.size
    assert part(predicted, "trained").bytes == 16 * 66_060_288 + size.adapter_copies
    assert size.adapter_copies > 2 * 66_060_288, "up factors stand side by side, zeros between them"
    tokens, cache = predicted.choices.decode_tokens, part(predicted, "KV cache")
    assert cache.note == f"{tokens // 11264} of 128 completions of 11,264 tokens at 144 KiB"
    assert cache.bytes == tokens * 147_456
    assert predicted.peak < 24 * GIB
    model_config = load_model_config(str(tmp_path))
    budgets = [
        Budget(config, model_config, predicted.size, Machine("cuda", gib * GIB, 1))
        for gib in (16, 24, 80, 141)
    ]
    plans = [plan(budget) for budget in budgets]
    assert [choices.gradient_checkpointing for choices in plans] == [True, True, False, False]
    assert [choices.decode_tokens // 11_264 for choices in plans] == PROFILE_ROWS
    short = [choices.decode_tokens // 2_048 for choices in plans]
    assert short == [14, 40, 223, 423], "2, 5, 24 and 44 before there were pages"
    assert budgets[0].left_for_pages(plans[0]) >= 0


def memory_of(folder: Path, gib: float = 40, **sections: dict[str, Any]) -> Memory:
    """Of a model with four of the layers, which takes a tenth of the time."""
    return predict_memory(qwen(folder, layers=4, **sections), memory_gib=gib)


def test_what_was_asked_for_shows_in_its_part(tmp_path: Path) -> None:
    plain = memory_of(tmp_path)
    size, layers = plain.size, plain.size.layer_weights
    quantized = memory_of(tmp_path, model={"load_in_4bit": True})
    saved = part(plain, "weights").bytes - part(quantized, "weights").bytes
    assert saved == pytest.approx(0.742 * layers, rel=1e-3)
    assert memory_of(tmp_path, model={"lora_rank": 64}).size.trained_bytes == 2 * size.trained_bytes
    short = memory_of(tmp_path, training={"max_tokens": 512, "batch_size": 1, "group_size": 4})
    cache = part(short, "KV cache")
    assert cache.bytes < part(plain, "KV cache").bytes and cache.note.startswith("4 of 4 ")
    int8 = memory_of(tmp_path, inference={"kv_cache_dtype": "int8"})
    assert int8.choices.decode_tokens > plain.choices.decode_tokens

    def learning(**sections: Any) -> Part:
        return part(memory_of(tmp_path, 80, **sections), "learning pass")

    training = {"max_tokens": 64}
    points = {"loss.entropy_coef": [[0, 0.0], [9, 0.1]]}
    bonus = learning(training=training, loss={"entropy_coef": 0.1}).bytes
    lifted = learning(training=training, schedule=points).bytes
    assert lifted == bonus > learning(training=training).bytes
    kept, checkpointed = (
        learning(training={"gradient_checkpointing": on}).note for on in (False, True)
    )
    assert kept.endswith("KiB") and checkpointed.endswith("checkpointed")


def test_a_larger_device_decodes_more_rows_and_no_budget_passes_the_device(tmp_path: Path) -> None:
    sizes = [memory_of(tmp_path, gib) for gib in (16, 24, 80)]
    tokens = [size.choices.decode_tokens for size in sizes]
    assert tokens == sorted(set(tokens))
    assert all(size.peak <= size.machine.memory for size in sizes)


def test_a_device_on_which_not_one_completion_fits_is_said_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(EnvironmentFailure, match=r"Lower \[training\] or"):
        memory_of(tmp_path, gib=1.6)


@pytest.mark.parametrize("asked", [{"attention_kernel": "triton"}, {"dtype": "fp8"}])
def test_what_a_server_decodes_with_is_not_asked_of_this_process(
    tmp_path: Path, asked: dict[str, str]
) -> None:
    served = {"engine": "vllm", "url": "http://127.0.0.1:8000"}
    assert predict_memory(small(tmp_path, inference=served | asked)).choices.decode_rows


def test_choices_that_a_run_has_stored_are_kept(tmp_path: Path) -> None:
    config = small(tmp_path)
    stored = predict_memory(config).choices
    machine = Machine("cpu", 2 * GIB, 1)
    assert predict_memory(config, memory_gib=machine.memory / GIB, choices=stored).choices == stored


def test_a_run_says_its_memory_before_it_loads_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(small(tmp_path / "run", training={"max_steps": 1}))
    printed = capsys.readouterr().out
    before, loads, _ = printed.partition("\nLoading train model")
    _, said, memory = before.partition("\nPredicted peak memory without Python")
    line = memory.partition("\n")[0]
    assert loads and said and "Predicted peak memory" not in memory
    for word in ("weights", "trained", "KV cache", "learning pass", "cpu"):
        assert word in line


# -- the machine's memory --------------------------------------------------------------------------


GROUP = "pods/one/box"


@pytest.mark.parametrize(
    ("own", "limits", "most"),
    [
        (f"0::/{GROUP}", {f"{GROUP}/memory.max": 3000, "pods/memory.max": 2000}, 2000),
        (f"0::/{GROUP}", {f"{GROUP}/memory.max": 1000, "pods/one/memory.max": 2000}, 1000),
        (f"0::/{GROUP}", {f"{GROUP}/memory.max": "max", "pods/two/memory.max": 2000}, None),
        ("0::/", {"memory.max": 4000}, 4000),
        (
            f"9:pids:/\n4:cpu,memory:/{GROUP}\n0::/",
            {
                f"memory/{GROUP}/memory.limit_in_bytes": 9223372036854771712,
                "memory/pods/memory.limit_in_bytes": 5000,
                "pids/memory.limit_in_bytes": 1,
            },
            5000,
        ),
        ("4:memory:/docker/1f", {"memory/memory.limit_in_bytes": 6000}, 6000),
        ("1:name=systemd:/a:b", {}, None),
        (None, {"memory.max": 1}, None),
    ],
)
def test_the_smallest_limit_of_a_control_group_and_its_ancestors_is_the_memory(
    tmp_path: Path, own: str | None, limits: dict[str, int | str], most: int | None
) -> None:
    for name, value in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    if own is not None:
        (tmp_path / "own").write_text(f"{own}\n")
    machine = psutil.virtual_memory().total
    assert total_memory(tmp_path, tmp_path / "own") == (most or machine)
    assert 0 < Machine.of(torch.device("cpu")).memory == total_memory() <= machine
