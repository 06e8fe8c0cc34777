"""Sampling and learning of one batch in a fresh process: seconds and memory of each half.

A request names the shape: `completions` of `tokens` tokens after prompts of `prompt_tokens`, in
groups of `group`. It may name the `halves` to measure, `repeats` (the best counts, beside which the
first stands) and keys of `[training]`. With `ragged` prompts have half to all of their tokens and
completions an eighth to all, other lengths at every turn: what real rows are. `profile` names a
half whose kernels are listed instead.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from job import FIRST_TOKEN
from worker import Measure, serve

import retrain.system

retrain.system.prepare_torch()

import numpy as np  # noqa: E402 - torch reads its environment when it is imported
import torch  # noqa: E402
from device import measured_on, profiled  # noqa: E402

from retrain.backends.local.backend import LocalBackend  # noqa: E402
from retrain.config import config_from_mapping  # noqa: E402
from retrain.inference_engine.base import NoiseKey, SampleRequest  # noqa: E402
from retrain.model.load import shared_models  # noqa: E402
from retrain.types import Completion, FinishReason, Row, StepResult  # noqa: E402

NEVER = 2**31 - 1
"""An EOS id outside the vocabulary: no token ends a completion."""


def row_of(completion: Completion, request: SampleRequest, advantage: float) -> Row:
    start, count = len(request.prompt_ids), len(completion.token_ids)
    return Row(
        token_ids=np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32),
        spans=((start, start + count),),
        logprobs=completion.logprobs,
        advantages=np.full(count, advantage, np.float32),
        group=completion.request,
    )


class Point:
    """A backend for batches of one shape, with the adapter and the machine choices of a run of that
    shape.
    """

    def __init__(self, settings: dict[str, Any], request: dict[str, Any]) -> None:
        self.device: str = settings.get("device", "cpu")
        self.group: int = request.get("group", settings["group"])
        self.prompt_tokens: int = request.get("prompt_tokens", settings["prompt_tokens"])
        self.vocabulary: int = settings["vocabulary"]
        self.ragged: bool = request.get("ragged", False)
        self.rng = np.random.default_rng(0)
        config = {
            "model": {
                "model": settings["model"],
                "lora_rank": settings["rank"],
                "dtype": settings.get("dtype", "fp32"),
            },
            "backend": {"devices": self.device},
            "lora": {"init_from": settings.get("adapter", "")},
            "training": {
                "seed": 0,
                "max_tokens": request["tokens"],
                "temperature": 1.0,
                **request.get("training", {}),
            },
        }
        self.backend = LocalBackend(config_from_mapping(config), eos_ids=(NEVER,))

    def requests(self, groups: int, tokens: int) -> list[SampleRequest]:
        if self.ragged:
            return [
                request for slot in range(groups) for request in self.ragged_requests(slot, tokens)
            ]
        prompts = self.rng.integers(
            FIRST_TOKEN, self.vocabulary, (groups, self.prompt_tokens)
        ).astype(np.int32)
        return [
            SampleRequest(prompt, self.group, tokens, 1.0, NoiseKey(0, 0, 0, slot))
            for slot, prompt in enumerate(prompts)
        ]

    def ragged_requests(self, slot: int, tokens: int) -> list[SampleRequest]:
        """A request for each completion of one prompt."""
        size = int(self.rng.integers(max(1, self.prompt_tokens // 2), self.prompt_tokens + 1))
        prompt = self.rng.integers(FIRST_TOKEN, self.vocabulary, size).astype(np.int32)
        limits = self.rng.integers(max(1, tokens // 8), tokens + 1, self.group).tolist()
        return [
            SampleRequest(prompt, 1, limit, 1.0, NoiseKey(0, 0, 0, slot), number)
            for number, limit in enumerate(limits)
        ]

    def sample(self, requests: list[SampleRequest]) -> list[Row]:
        done = list(self.backend.engine.sample(requests))
        return [
            row_of(one, requests[one.request], float(self.rng.standard_normal())) for one in done
        ]

    def invent(self, requests: list[SampleRequest]) -> list[Row]:
        """Rows of random tokens with the learner's own log-probs."""
        rows = []
        for index, request in enumerate(requests):
            for sample in range(request.count):
                ids = self.rng.integers(FIRST_TOKEN, self.vocabulary, request.max_tokens).astype(
                    np.int32
                )
                one = Completion(
                    index, sample, ids, np.zeros(len(ids), np.float32), None, FinishReason.LENGTH
                )
                rows.append(row_of(one, request, float(self.rng.standard_normal())))
        return [
            replace(row, logprobs=own)
            for row, own in zip(rows, self.backend.logprobs(rows), strict=True)
        ]

    def halves(
        self, groups: int, tokens: int, wanted: list[str]
    ) -> tuple[dict[str, Measure], StepResult | None, list[Row]]:
        asked = self.requests(groups, tokens)
        measures, result = {}, None
        if "sampling" in wanted:
            with measured_on(self.device) as measures["sampling"]:
                rows = self.sample(asked)
        else:
            rows = self.invent(asked)
        if "learning" in wanted:
            with measured_on(self.device) as measures["learning"]:
                result = self.backend.train(rows, 0)
        assert sum(row.num_actions for row in rows) == sum(
            request.count * request.max_tokens for request in asked
        )
        return measures, result, rows

    def profile(self, groups: int, tokens: int, half: str) -> dict[str, Any]:
        """Twice the same work: once timed, once with its kernels listed."""
        asked = self.requests(groups, tokens)
        rows = self.invent(asked) if half == "learning" else []

        def run() -> None:
            if half == "learning":
                self.backend.train(rows, 0)
            else:
                self.sample(asked)

        run()
        with measured_on(self.device) as measure:
            run()
        return {"seconds": measure.seconds, "kernels": profiled(run, self.device)}


def best_of(
    half: str, turns: list[tuple[dict[str, Measure], StepResult | None, list[Row]]]
) -> dict[str, Any]:
    """The turn that was fastest for its tokens, with these tokens and the seconds of the first
    turn.
    """
    measures, _, rows = min(
        turns, key=lambda turn: turn[0][half].seconds / sum(row.num_actions for row in turn[2])
    )
    lengths = [row.num_actions for row in rows]
    packed = sum(len(row.token_ids) for row in rows)
    return {
        **vars(measures[half]), "drawn": sum(lengths), "longest": max(lengths), "packed": packed,
        "first_seconds": turns[0][0][half].seconds
    }  # fmt: skip


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])
    kept = ExitStack()
    kept.enter_context(shared_models())  # until the process ends

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        point = Point(settings, request)
        groups, tokens = request["completions"] // point.group, request["tokens"]
        if "profile" in request:
            return point.profile(groups, tokens, request["profile"])
        wanted = request.get("halves", ["sampling", "learning"])
        point.halves(1, 8, wanted)  # warms up
        turns = [point.halves(groups, tokens, wanted) for _ in range(request.get("repeats", 1))]
        choices, result = point.backend.choices, turns[0][1]
        return {
            **{half: best_of(half, turns) for half in wanted},
            "rows_at_once": f"{choices.decode_rows:,}",
            "micro_batch": (
                f"{choices.micro_batch_tokens:,}{', checkpointing' if choices.gradient_checkpointing else ''}"
            ),
            "fused": point.backend._fused is not None,
            "ratio_max": result.ratio_max if result else None,
            "ratio_min": result.ratio_min if result else None,
        }

    return answer


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
