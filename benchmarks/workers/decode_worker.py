"""Samples a job with the PyTorch engine, `generate` or transformers' continuous batching, as
settings["kind"] says.
"""

from collections.abc import Callable
from typing import Any

from job import Job, make_job
from worker import serve

import retrain.system

retrain.system.prepare_torch()

import numpy as np  # noqa: E402 - torch reads its environment when it is imported
import torch  # noqa: E402
from device import measured_on  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from retrain.inference_engine.base import NoiseKey, SampleRequest  # noqa: E402
from retrain.inference_engine.torch_engine import TorchEngine  # noqa: E402
from retrain.model.devices import EngineOptions  # noqa: E402
from retrain.model.fused import FusedDecoder  # noqa: E402

_PAGE_SIZE = next(
    name for name in ("page_size", "block_size") if hasattr(ContinuousBatchingConfig, name)
)
"""transformers 5.23 renamed it."""
Run = Callable[[Job, int], int]
"""Samples the job with this seed; returns the number of sampled tokens."""


def engine(settings: dict[str, Any]) -> Run:
    """The engine as a run has it: the learner's fp32 model, a copy with merged adapter for the
    sampler, and `[inference] dtype`.
    """
    model = load(settings, torch.float32)
    fused = FusedDecoder.of(model.get_base_model(), merge=True)
    options = EngineOptions(weights=torch.bfloat16 if settings["engine_dtype"] == "bf16" else None)
    decoder = TorchEngine(
        model, [], "cpu", decode_rows=settings["rows"], options=options, fused=fused
    )

    def run(job: Job, seed: int) -> int:
        if job.uniform:  # one request a group, as a trainer asks
            asked = [
                SampleRequest(p, job.group, job.lengths[0], 1.0, NoiseKey(1, 0, seed, i))
                for i, p in enumerate(job.prompts)
            ]
        else:
            asked = [
                SampleRequest(
                    prompt,
                    1,
                    job.lengths[i * job.group + j],
                    1.0,
                    NoiseKey(1, 0, seed, i),
                    first_sample=j,
                )
                for i, prompt in enumerate(job.prompts)
                for j in range(job.group)
            ]
        return sum(len(one.token_ids) for one in decoder.sample(asked))

    return run


def generate(settings: dict[str, Any]) -> Run:
    """One batch of all completions, prompts padded on the left, until the longest completion is
    done.
    """
    device = settings.get("device", "cpu")
    model = load(settings, getattr(torch, settings["torch_dtype"])).to(device)

    def run(job: Job, seed: int) -> int:
        longest, most = max(len(prompt) for prompt in job.prompts), max(job.lengths)
        ids = np.zeros((len(job.lengths), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row in range(len(job.lengths)):
            prompt = job.prompts[row // job.group]
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        torch.manual_seed(seed)
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device), do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=most, min_new_tokens=most,
                pad_token_id=0,
            )  # fmt: skip
        assert output.shape[1] == longest + most
        return job.tokens

    return run


def continuous(settings: dict[str, Any]) -> Run:
    """What `generate_batch` does, with one manager for all turns, as a server would.

    A prompt is prefilled once per group only if all completions have the same length, since
    `num_return_sequences` belongs to the manager.
    """
    device = settings.get("device", "cpu")
    model = load(settings, getattr(torch, settings["torch_dtype"])).to(device)
    tokens, rows, page = settings["tokens"], settings["rows"], settings["page_size"]
    config = ContinuousBatchingConfig(
        **{_PAGE_SIZE: page},
        num_blocks=rows * (-(-2 * tokens // page) + 1),
        max_batch_tokens=max(rows, settings["prefill_tokens"]),
        max_requests_per_batch=rows,
        return_logprobs=True,
    )
    running: dict[int, Any] = {}

    def manager(group: int) -> Any:
        if group not in running:
            for other in list(running):
                running[other].stop(block=True)
                running.pop(other).destroy()
            sampling = GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=-1,
                max_new_tokens=tokens,
                num_return_sequences=group,
            )
            running[group] = model.init_continuous_batching(
                generation_config=sampling, continuous_batching_config=config
            )
            running[group].start()
        return running[group]

    def run(job: Job, seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            serving = manager(job.group if job.uniform else 1)
            lengths = job.lengths[:: job.group] if job.uniform else job.lengths
            for number, length in enumerate(lengths):
                serving.add_request(
                    job.prompts[number * len(job.prompts) // len(lengths)].tolist(),
                    max_new_tokens=length,
                )
            return sum(tokens_of_next(serving) for _ in job.lengths)

    return run


def tokens_of_next(serving: Any) -> int:
    """Wait for a request to finish; returns its number of tokens."""
    while True:
        result = serving.get_result(timeout=1)
        if result is None and not serving.is_running():
            raise RuntimeError("continuous batching ended before its requests")
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            return len(result.generated_tokens)


def load(settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model with the adapter in its dtype, so that bf16 layers need no cast; the engine keeps
    the adapter in fp32.
    """
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    return PeftModel.from_pretrained(
        base, settings["adapter"], autocast_adapter_dtype=dtype == torch.float32
    ).eval()


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])
    run = {"engine": engine, "generate": generate, "continuous": continuous}[settings["kind"]](
        settings
    )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        shape = settings["vocabulary"], settings["prompts"], settings["group"]
        job = make_job(
            *shape,
            request["tokens"],
            request["ragged"],
            request["step"],
            settings.get("prompt_tokens"),
        )
        with measured_on(settings.get("device", "cpu")) as measure:
            made = run(job, request["step"])
        assert made == job.tokens, f"{made} tokens instead of {job.tokens}"
        return {"tokens": job.tokens, **vars(measure)}

    return answer


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
