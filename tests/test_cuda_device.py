"""On a GPU, or on one that is pretended: captured steps draw what called ones draw, an update is
the same bytes twice, and so is a run that was resumed.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretended_cuda import pretended
from runs import small

from retrain import train
from retrain.backends.local.backend import LocalBackend
from retrain.backends.local.learner import Learner
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest, Truncation
from retrain.inference_engine.fixed_step import FixedStep, _capture_stream
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.types import Completion, Row
from tests.learner_models import VOCABULARY, config_for
from tests.marks import first_of

HAS_GPU = torch.cuda.is_available()
SAMPLES, TOKENS = (6, 20) if HAS_GPU else (2, 5)
TEMPERATURE = 0.7
ON_GPU: dict[str, Any] = {"backend": {"devices": "gpu:0"}}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, or one that is pretended."""
    with nullcontext() if HAS_GPU else pretended(monkeypatch, devices=2):
        yield


def requests() -> list[SampleRequest]:
    prompts = [np.arange(4 + slot, 14 + 5 * slot, dtype=np.int32) % 50 + 4 for slot in range(3)]
    return [
        SampleRequest(ids, SAMPLES, TOKENS * (slot + 2) // 2, TEMPERATURE, NoiseKey(1, 0, 0, slot))
        for slot, ids in enumerate(prompts)
    ]


def paged(*eos_ids: int) -> LocalBackend:
    """A backend with pages and captured steps, also where torch's kernel reads no pages (2.11)."""
    engine = (backend := LocalBackend(config_for(**ON_GPU), eos_ids=eos_ids)).engine
    assert isinstance(engine, TorchEngine)
    engine._options = replace(engine._options, paged=True)
    return backend


def drawn(backend: LocalBackend) -> dict[tuple[int, int], Completion]:
    return {(one.request, one.sample): one for one in backend.engine.sample(requests())}


def row_of(one: Completion) -> Row:
    prompt = requests()[one.request].prompt_ids
    span = (len(prompt), len(prompt) + len(one.token_ids))
    advantages = np.full(len(one.token_ids), 1.0 - 2 * (one.sample % 2), np.float32)
    ids = np.concatenate([prompt, one.token_ids])
    return Row(ids, (span,), one.logprobs, advantages, one.request)


def rows_of(backend: LocalBackend) -> list[Row]:
    """What it draws, after the learner has found nearly the sampler's log-probs."""
    rows = [row_of(one) for _, one in sorted(drawn(backend).items())]
    own = np.concatenate(backend.logprobs(rows, TEMPERATURE))
    difference = np.abs(own - np.concatenate([row.logprobs for row in rows]))
    other = backend.rounded_logprobs(rows, TEMPERATURE) if HAS_GPU else None  # it rounds both
    limit = 0.02 if other is None else 2 * np.abs(own - np.concatenate(other)).mean()
    assert difference.mean() < limit and difference.max() < 0.5
    return rows


def adapter_of(folder: Path) -> bytes:
    return next(folder.rglob("final/adapter_model.safetensors")).read_bytes()


def test_a_row_has_the_same_bits_beside_other_neighbors_of_one_bucket() -> None:
    """Its attention is its own, and a product's kernel is chosen by the number of rows, which the
    bucket fixes.
    """
    one, other = (np.arange(first, first + 12, dtype=np.int32) for first in (5, 30))
    found = []
    for neighbor in (one, other):
        asked = [
            SampleRequest(ids, SAMPLES, TOKENS, TEMPERATURE, NoiseKey(1, 0, 0, slot))
            for slot, ids in enumerate((one, neighbor[::-1].copy()))
        ]
        draws = paged(VOCABULARY).engine.sample(asked)  # none ends early: one bucket
        found.append({draw.sample: draw.logprobs for draw in draws if draw.request == 0})
    np.testing.assert_equal(*found)


@pytest.mark.parametrize(
    ("family", "sections"),
    first_of(
        [
            ("gemma2", {}),
            ("qwen3", {"inference": {"kv_cache_dtype": "int8"}}),
            ("llama", {}),
            ("opt", {}),
            ("qwen3", {"model": {"dtype": "fp32"}}),
            ("qwen3", {"inference": {"attention_kernel": "cutlass"}}),
            ("qwen3", {"lora": {"dropout": 0.1}}),
        ],
        quick=2,
    ),
    ids=str,
)
def test_models_and_choices_of_every_kind_sample_and_learn(
    family: str, sections: dict[str, Any]
) -> None:
    """Soft caps, norms and windows of other families, the engine without pages, rows that are cut,
    greedy, or without the adapter.
    """
    config = config_for(family, training={"lr": 0.01}, **sections, **ON_GPU)
    backend = LocalBackend(config, eos_ids=[3])
    first, second, third = requests()
    changed = [
        replace(first, truncation=Truncation(top_k=5)),
        replace(second, temperature=0.0),
        replace(third, adapter_slot=BASE_MODEL),
    ]
    assert len(list(backend.engine.sample(changed))) == 3 * SAMPLES
    assert backend.train(rows_of(backend), 0).updates == 1


def test_captured_steps_draw_what_called_ones_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = paged(3)
    expected = drawn(captured)
    assert captured.engine._paged.step._graphs  # type: ignore[attr-defined]  # as `paged` asserts
    monkeypatch.setattr(
        FixedStep, "launch", lambda steps, rows, variant: torch.no_grad()(steps.step)(rows, variant)
    )
    for key, one in drawn(paged(3)).items():
        np.testing.assert_array_equal(one.token_ids, expected[key].token_ids)
        np.testing.assert_array_equal(one.logprobs, expected[key].logprobs)


def test_steps_are_captured_on_one_stream_and_none_is_under_way_after_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS keeps a workspace for every stream, and the memory of a graph may be unmapped while it
    runs on another than that of its capture.
    """
    streams, captures, under_way = list[Any](), list[Any](), set[int]()
    own_stream, own_graph, own_event = torch.cuda.Stream, torch.cuda.graph, torch.cuda.Event

    class Event(own_event):  # type: ignore[misc, valid-type]  # a stand-in where the device is pretended
        def record(self, *arguments: Any) -> None:
            super().record(*arguments)
            under_way.add(id(self))

        def synchronize(self) -> None:
            super().synchronize()
            under_way.discard(id(self))

    def stream(*arguments: Any, **named: Any) -> Any:
        made = own_stream(*arguments, **named)
        if "stream_id" not in named:  # `current_stream` names one that is there
            streams.append(made)
        return made

    def graph(*arguments: Any, **named: Any) -> Any:
        captures.append(named["stream"])
        return own_graph(*arguments, **named)

    backend = paged(3)
    for name, stand_in in {"Stream": stream, "graph": graph, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    _capture_stream.cache_clear()
    for most in (1, None):
        calls = backend.engine.sample(requests())
        assert list(islice(calls, most))
        calls.close()  # type: ignore[attr-defined]  # a generator, which a caller may leave
        assert not under_way
        backend.engine.free_pages()  # type: ignore[attr-defined]  # the engine of this backend has pages
    assert len(captures) > 2 and len(streams) == 1 and all(one is streams[0] for one in captures)


@pytest.mark.skipif(HAS_GPU, reason="the second device is pretended")
def test_the_learner_computes_on_its_device_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of a model's own code may go to the current device, wherever their tensors are."""
    current: list[str] = []

    @contextmanager
    def device(named: torch.device) -> Iterator[None]:
        current.append(str(named))
        try:
            yield
        finally:
            current.pop()

    seen: list[str] = []
    forward = Learner._hidden_states
    monkeypatch.setattr(
        Learner,
        "_hidden_states",
        lambda learner, *args, **named: (
            seen.append(current[-1]) or forward(learner, *args, **named)
        ),
    )
    monkeypatch.setattr(torch.cuda, "device", device)
    backend = LocalBackend(config_for(backend={"devices": "gpu:1"}), eos_ids=[3])
    rows = [row_of(one) for _, one in sorted(drawn(backend).items())]
    backend.logprobs(rows)
    backend.train(rows, 0)
    assert set(seen) == {"cuda:1"} and len(seen) > 1


def test_sampler_and_learner_are_one_policy_and_an_update_is_the_same_bytes_twice() -> None:
    digests = []
    for _ in range(2):
        backend = LocalBackend(config_for(training={"lr": 0.01}, **ON_GPU), eos_ids=[3])
        assert backend.train(rows_of(backend), 0).updates == 1
        weights = (
            parameter.detach().cpu().numpy().tobytes()
            for parameter in backend._weights.parameters.values()
        )
        digests.append(hashlib.sha256(b"".join(weights)).hexdigest())
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_sample_ahead_learn_what_one_does(tmp_path: Path) -> None:
    """With a checkpoint at every step nothing is sampled ahead, so the runs differ in the devices
    alone.
    """
    for devices in ("gpu:0", "gpu:0,gpu:1"):
        training = {"max_steps": 2, "save_every": 1}
        train(small(tmp_path / devices, training=training, backend={"devices": devices}))
    assert adapter_of(tmp_path / "gpu:0") == adapter_of(tmp_path / "gpu:0,gpu:1")


@pytest.mark.slow
def test_a_resumed_run_has_the_bytes_of_one_that_went_on(tmp_path: Path) -> None:
    whole, first = (12, 5) if HAS_GPU else (2, 1)
    for folder, end in (("whole", whole), ("parted", first), ("parted", whole)):
        resume = {"from": str(tmp_path / folder)} if (tmp_path / folder).exists() else {}
        training = {"max_steps": end, "save_every": first}
        train(small(tmp_path / folder, training=training, resume=resume, **ON_GPU))
    assert adapter_of(tmp_path / "whole") == adapter_of(tmp_path / "parted")
