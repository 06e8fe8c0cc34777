"""Sampling speed of the PyTorch engine beside Hugging Face `generate`: same model, adapter, prompts and lengths, in one run.

`python benchmarks/decode.py --model models/smollm2-135m` prints a table and writes it under benchmarks/results/. Prompts are random
token ids (their content does not change the cost), lengths are forced. In the ragged rows the completions have different
lengths; `generate` has to go on to the longest one, and only tokens that were asked for are counted. Both make the token's
log-prob available; the engine also gives its entropy. The two take turns, and the best of the repeats counts.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine

LAB_SHAPE = {
    "vocab_size": 100,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Job:
    """Prompts and, per completion, the number of tokens; completion j of prompt i is lengths[i * group + j]."""

    prompts: list[np.ndarray]
    group: int
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def load(name: str) -> nn.Module:
    if name == "lab-shape":
        base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LAB_SHAPE))
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()


def make_job(model: nn.Module, prompts: int, group: int, tokens: int, ragged: bool) -> Job:
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    made = [rng.integers(3, vocabulary, int(rng.integers(tokens // 2, tokens))).astype(np.int32) for _ in range(prompts)]
    lengths = rng.integers(tokens // 8, tokens + 1, prompts * group).tolist() if ragged else [tokens] * (prompts * group)
    return Job(made, group, lengths)


def engine_run(model: nn.Module, job: Job) -> Callable[[int], None]:
    engine = TorchEngine(model, [], "cpu", decode_rows=len(job.lengths))

    def run(step: int) -> None:
        requests = [
            SampleRequest(prompt, 1, job.lengths[i * job.group + j], 1.0, NoiseKey(1, 0, step, i), first_sample=j)
            for i, prompt in enumerate(job.prompts)
            for j in range(job.group)
        ]
        if len(set(job.lengths)) == 1:  # one request a group, as a trainer asks
            requests = [SampleRequest(p, job.group, job.lengths[0], 1.0, NoiseKey(1, 0, step, i)) for i, p in enumerate(job.prompts)]
        assert sum(len(one.token_ids) for one in engine.sample(requests)) == job.tokens

    return run


def generate_run(model: nn.Module, job: Job) -> Callable[[int], None]:
    """One batch of all completions, prompts padded on the left, until the longest completion is done."""
    longest = max(len(prompt) for prompt in job.prompts)
    ids = np.zeros((len(job.lengths), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row in range(len(job.lengths)):
        prompt = job.prompts[row // job.group]
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    most = max(job.lengths)

    def run(step: int) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=most, min_new_tokens=most, pad_token_id=0,
            )  # fmt: skip
        assert output.shape[1] == longest + most

    return run


def seconds(runs: list[Callable[[int], None]], repeats: int) -> list[tuple[float, float]]:
    """Best (wall, processor) seconds of each run; they take turns, after one short turn to warm up."""
    best = [(float("inf"), float("inf"))] * len(runs)
    for step in range(repeats):
        for index, run in enumerate(runs):
            wall, processor = time.perf_counter(), time.process_time()
            run(step)
            took = time.perf_counter() - wall, time.process_time() - processor
            best[index] = (min(best[index][0], took[0]), min(best[index][1], took[1]))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lab-shape", help="a model folder, or lab-shape: the lab model's size with random weights")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    busy = os.getloadavg()[0]
    torch.manual_seed(0)
    model = load(arguments.model)
    shape = (arguments.prompts, arguments.group, arguments.tokens)

    lines = ["| lengths | tokens | engine tok/s | generate tok/s | ratio (wall) | ratio (CPU seconds) |", "|---|---|---|---|---|---|"]
    for ragged in (False, True):
        job = make_job(model, *shape, ragged)
        (ours, ours_cpu), (theirs, theirs_cpu) = seconds([engine_run(model, job), generate_run(model, job)], arguments.repeats)
        name = f"{min(job.lengths)} to {max(job.lengths)}" if ragged else f"all {arguments.tokens}"
        rates = f"{job.tokens / ours:.0f} | {job.tokens / theirs:.0f} | {theirs / ours:.2f} | {theirs_cpu / ours_cpu:.2f}"
        lines.append(f"| {name} | {job.tokens:,} | {rates} |")

    today = datetime.now(UTC).date().isoformat()
    name = Path(arguments.model).name
    command = f"python benchmarks/decode.py --model {arguments.model} --prompts {shape[0]} --group {shape[1]} --tokens {shape[2]}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    text = (
        f"# Decoding, {name}, {shape[0]} prompts x {shape[1]} completions, {today}\n\n"
        f"Command: `{command} --repeats {arguments.repeats} --threads {arguments.threads}`. fp32, LoRA r16 on, "
        f"best of {arguments.repeats}. {platform.machine()}, {arguments.threads} threads, "
        f"load average {busy:.1f} before the run, {versions}.\n\n" + "\n".join(lines) + "\n"
    )
    print(text)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"decode-{name}-{shape[0]}x{shape[1]}-{today}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
