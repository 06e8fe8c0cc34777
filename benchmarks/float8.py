"""What 8-bit weights change in a model's distributions, beside bf16, in nats; and the bytes that
the weights take.

    python benchmarks/float8.py                     # the lab model
    python benchmarks/float8.py --model FOLDER

Completions are drawn from the model in float32, and each of its tokens is scored by the same model
with weights in bf16 (products in float32, so that only the weights are rounded) and in 8 bits.
"""

import argparse
from typing import Any

import numpy as np
import torch
from report import add_output, load_average, publish, table, versions_line
from transformers import AutoModelForCausalLM

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.torch_engine import TorchEngine
from retrain.model.packed import hold_layers_in_float8
from retrain.model.text import resolve_model

PROMPTS, GROUP, PROMPT_TOKENS, TOKENS = 8, 4, 16, 64


def loaded(folder: str, weights: str) -> Any:
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        .eval()
        .requires_grad_(False)
    )
    if weights == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    if weights == "fp8":
        hold_layers_in_float8(model.base_model, folder)
    return model


@torch.no_grad()
def distributions(model: Any, rows: list[np.ndarray]) -> torch.Tensor:
    """[tokens, V] log-probs after the prompt of every row."""
    parts = [
        torch.log_softmax(
            model(torch.from_numpy(row).long()[None]).logits[0, PROMPT_TOKENS - 1 : -1].double(), -1
        )
        for row in rows
    ]
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lab", help="folder, id or lab")
    add_output(parser)
    arguments = parser.parse_args()
    load, folder = load_average(), resolve_model(arguments.model)
    exact = loaded(folder, "fp32")
    rng, vocabulary = np.random.default_rng(0), exact.config.vocab_size
    prompts = [rng.integers(4, vocabulary, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)]
    requests = [
        SampleRequest(ids, GROUP, TOKENS, 1.0, NoiseKey(1, 0, 0, slot))
        for slot, ids in enumerate(prompts)
    ]
    rows = [
        np.concatenate([prompts[one.request], one.token_ids])
        for one in TorchEngine(exact, [], "cpu").sample(requests)
    ]
    drawn = torch.cat([torch.from_numpy(row[PROMPT_TOKENS:]).long() for row in rows])[:, None]
    expected, lines = distributions(exact, rows), []
    for weights in ("fp32", "bf16", "fp8"):
        model = loaded(folder, weights)
        found = distributions(model, rows)
        difference = (found - expected).gather(1, drawn).abs()
        divergence = (expected.exp() * (expected - found)).sum(-1).mean()
        held = sum(parameter.nbytes for parameter in model.parameters()) // (
            2 if weights == "bf16" else 1
        )
        lines.append(
            [
                weights,
                f"{held / 2**20:,.2f}",
                f"{difference.mean():.1e}",
                f"{difference.max():.1e}",
                f"{divergence:.1e}",
            ]
        )
    publish(
        f"float8-{arguments.model.rstrip('/').rpartition('/')[2].lower()}",
        f"Weights of {arguments.model} in 8 bits: differences of log-probs in nats",
        [
            (
                f"{len(drawn):,} drawn tokens. {versions_line({'torch': torch.__version__})}."
                " Beside 8 bits, head and embeddings are in float32 here; on CUDA they are bf16."
            ),
            table(
                [
                    "weights",
                    "MiB",
                    "mean difference of a drawn token",
                    "largest",
                    "divergence from float32",
                ],
                lines,
            ),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
