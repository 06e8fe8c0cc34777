"""One batch sampled and learned from in a fresh process: seconds and memory of each half."""

from collections.abc import Callable
from typing import Any

from job import FIRST_TOKEN
from worker import measured, serve

import retrain.threads

retrain.threads.spin_briefly()

import numpy as np  # noqa: E402 - torch reads its environment when it is imported
import torch  # noqa: E402

from retrain.backends.local.backend import LocalBackend  # noqa: E402
from retrain.config import config_from_mapping  # noqa: E402
from retrain.inference_engine.base import NoiseKey, SampleRequest  # noqa: E402
from retrain.types import Completion, Row  # noqa: E402


def row_of(completion: Completion, request: SampleRequest, advantage: float) -> Row:
    start, count = len(request.prompt_ids), len(completion.token_ids)
    return Row(
        token_ids=np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32),
        spans=((start, start + count),),
        logprobs=completion.logprobs,
        advantages=np.full(count, advantage, np.float32),
        group=completion.request,
    )


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        completions, tokens, group = request["completions"], request["tokens"], settings["group"]
        config = {
            "model": {"model": settings["model"], "lora_rank": settings["rank"], "dtype": "fp32"},
            "backend": {"devices": "cpu"},
            "training": {"seed": 0, "max_tokens": tokens, "temperature": 1.0},
        }
        backend = LocalBackend(config_from_mapping(config), eos_ids=(2**31 - 1,))  # no token ends a completion
        rng = np.random.default_rng(0)

        def one_step(groups: int, length: int) -> tuple[Any, Any]:
            prompts = rng.integers(FIRST_TOKEN, settings["vocabulary"], (groups, settings["prompt_tokens"])).astype(np.int32)
            asked = [SampleRequest(prompt, group, length, 1.0, NoiseKey(0, 0, 0, slot)) for slot, prompt in enumerate(prompts)]
            with measured() as sampling:
                done = list(backend.engine.sample(asked))
            rows = [row_of(one, asked[one.request], float(rng.standard_normal())) for one in done]
            with measured() as learning:
                backend.train(rows, 0)
            assert {row.num_actions for row in rows} == {length}
            return sampling, learning

        one_step(1, 8)  # warms up
        sampling, learning = one_step(completions // group, tokens)
        choices = backend.choices
        return {
            "sampling": vars(sampling),
            "learning": vars(learning),
            "rows_at_once": f"{choices.decode_rows:,}",
            "micro_batch": f"{choices.micro_batch_tokens:,}{', checkpointing' if choices.gradient_checkpointing else ''}",
        }

    return answer


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
