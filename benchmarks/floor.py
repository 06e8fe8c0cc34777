"""The seconds that the matrix products with a model's frozen weights alone take of a step on a CPU,
by the fastest operator that torch has for each: no step of these FLOPs can be faster.

    python benchmarks/floor.py --model models/smollm2-135m

It is the step of step.py: 4 prompts x 8 completions x 128 tokens. The learner's products are one
forward and one for the gradient of the input, over every token of a prompt once and of all its
completions; the head's over the completions alone. The sampler's are over one token of each row, for
every token that is drawn, with the weights of all layers in turn, so that they come from memory.
The adapter, attention, norms, the draw, the loss and the optimizer are left out.

Operators: `linear`, which is MKL's on x86 and packs the weight at every call; oneDNN's, for the
learner from the weight as it is, for the sampler packed before.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from report import add_output, load_average, publish, table
from step import story_prompts
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from retrain.model.packed import PackedWeight

ROWS = (512, 1024, 2048, 4096)
"""Tokens of one product of the learner; the fastest counts."""
Product = Callable[[Tensor], Tensor]


class Shape(NamedTuple):
    name: str
    outputs: int
    inputs: int
    layers: int

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * self.layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder of a Llama-like model")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=7)
    add_output(parser)
    given, load = parser.parse_args(), load_average()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    prompt_tokens = sum(len(tokenizer(prompt).input_ids) for prompt in story_prompts(given.prompts))
    rows = given.prompts * given.group
    shapes = shapes_of(AutoConfig.from_pretrained(given.model))
    with torch.no_grad():
        learning, learned = learner(shapes, prompt_tokens, rows * given.tokens, given.repeats)
        sampling, sampled = sampler(shapes, rows, given.tokens, given.repeats)
        bandwidth = read_rate(sum(shape.elements for shape in shapes), given.repeats)
    publish(
        f"floor-{given.model.rstrip('/').rpartition('/')[2]}",
        f"What the products of a step take, {given.prompts} prompts x {given.group} completions x"
        f" {given.tokens} tokens",
        [
            (
                f"float32, {given.threads} threads, torch {torch.__version__}; medians of"
                f" {given.repeats}. {prompt_tokens} tokens of prompts. Memory is read at"
                f" {bandwidth:.1f} GB/s."
            ),
            f"**Learning: {learned:.1f} s.** Forward, and the gradient of the input:",
            table(
                ["weights", *(f"{name}, GFLOP/s" for name in LEARNERS), "seconds of a step"],
                learning,
            ),
            f"**Sampling: {sampled:.1f} s.** Milliseconds of one token of all {rows} rows:",
            table(["weights", *OPERATORS, "GFLOP/s of the fastest"], sampling),
        ],
        load,
        given.output,
    )


def shapes_of(config: AutoConfig) -> list[Shape]:
    """Layers that read the same input are one product, as in the fused decoder."""
    wide, heads = config.hidden_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or wide // heads
    attention, layers = heads * head, config.num_hidden_layers
    return [
        Shape("q, k, v", attention + 2 * config.num_key_value_heads * head, wide, layers),
        Shape("o", wide, attention, layers),
        Shape("gate, up", 2 * config.intermediate_size, wide, layers),
        Shape("down", wide, config.intermediate_size, layers),
        Shape("head", config.vocab_size, wide, 1),
    ]


def learner(
    shapes: Iterable[Shape], prompt_tokens: int, completion_tokens: int, repeats: int
) -> tuple[list[list[str]], float]:
    """(rows of the table, seconds of all)."""
    lines, total = [], 0.0
    for shape in shapes:
        weight = torch.randn(shape.outputs, shape.inputs)
        per_token = [
            min(_both_ways(product, weight, rows, repeats) / rows for rows in ROWS)
            for product in LEARNERS.values()
        ]
        tokens = completion_tokens + (0 if shape.layers == 1 else prompt_tokens)
        needed = min(per_token) * tokens * shape.layers
        total += needed
        rates = [4e-9 * shape.outputs * shape.inputs / one for one in per_token]
        lines.append([shape.name, *(f"{rate:.0f}" for rate in rates), f"{needed:.2f}"])
    return lines, total


LEARNERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "`linear`": F.linear,
    "oneDNN": lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
}
"""Of [N, I] and [O, I], which may be a transposed view."""


def _both_ways(
    product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, rows: int, repeats: int
) -> float:
    """Seconds of the forward product and of the one for the gradient of its input."""
    outputs, inputs = weight.shape
    x, grad = torch.randn(rows, inputs), torch.randn(rows, outputs)
    forward = seconds(lambda: product(x, weight), repeats)
    return forward + seconds(lambda: product(grad, weight.T), repeats)


def _plain(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


OPERATORS: dict[str, Callable[[Tensor], Product]] = {
    "`linear`": _plain,
    "oneDNN, packed": lambda weight: PackedWeight(weight, None).product,
}


def sampler(
    shapes: Iterable[Shape], rows: int, tokens: int, repeats: int
) -> tuple[list[list[str]], float]:
    """(rows of the table, seconds of all)."""
    lines, total = [], 0.0
    for shape in shapes:
        x, times = torch.randn(rows, shape.inputs), []
        for made in OPERATORS.values():
            products = [made(torch.randn(shape.outputs, shape.inputs)) for _ in range(shape.layers)]
            times.append(seconds(lambda x=x, all=products: [one(x) for one in all], repeats))
        total += min(times) * tokens
        rate = 2e-9 * rows * shape.elements / min(times)
        lines.append([shape.name, *(f"{1e3 * one:.1f}" for one in times), f"{rate:.0f}"])
    return lines, total


def read_rate(elements: int, repeats: int) -> float:
    """GB/s of a sum over as many numbers as the model has weights."""
    numbers = torch.randn(elements)
    return 4e-9 * elements / seconds(numbers.sum, repeats)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median, after one call that warms up."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    main()
