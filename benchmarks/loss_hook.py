"""A step with a loss of one's own beside the same step with the built-in loss of the same formula.

    python benchmarks/loss_hook.py

Two backends of one process, the lab model: each pair is one step of both, sampling and learning,
the order alternating. The plugin is ppo as a user writes it, with a metric and a clip mask. Both
learn the same, to the byte, so a ratio is of the hook alone. The interval of the median is from
order statistics: with ten pairs from the second to the ninth, which holds the median in 97.9% of
cases.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import torch
from report import add_output, load_average, median_interval, publish, table

from retrain.backends.local.backend import LocalBackend
from retrain.backends.own_loss import own_functions
from retrain.backends.proof import prove
from retrain.config import TrainConfig, config_from_mapping
from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.types import Row

LOSSES = {
    "built in": {"mode": "ppo"},
    "own": {"mode": "workers.own_ppo.ppo", "params": {"clip": 0.2}},
}


def configuration(name: str) -> TrainConfig:
    training = {"seed": 0, "temperature": 1.0, "updates_per_batch": 2, "lr": 1e-3}
    return config_from_mapping(
        {
            "model": {"model": "lab", "lora_rank": 16},
            "backend": {"devices": "cpu"},
            "training": training,
            "loss": LOSSES[name],
        }
    )


@contextmanager
def backends() -> Iterator[dict[str, LocalBackend]]:
    made: dict[str, LocalBackend] = {}
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        for name in LOSSES:
            torch.set_num_threads(
                threads
            )  # a backend sets them, and the next would choose its workers from what it finds
            made[name] = stack.enter_context(
                closing(LocalBackend(configuration(name), eos_ids=(10**6,)))
            )  # no token ends a completion
        assert len({backend.choices.workers for backend in made.values()}) == 1
        yield made


def one_step(backend: LocalBackend, step: int, groups: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of sampling and of learning."""
    requests = [
        SampleRequest(np.arange(5, 35, dtype=np.int32), 8, tokens, 1.0, NoiseKey(0, 0, step, slot))
        for slot in range(groups)
    ]
    start = time.monotonic()
    done = sorted(backend.engine.sample(requests), key=lambda one: (one.request, one.sample))
    middle = time.monotonic()
    rows = [
        Row(
            np.concatenate([requests[one.request].prompt_ids, one.token_ids]),
            ((30, 30 + tokens),),
            one.logprobs,
            np.full(tokens, 1.0 if one.sample % 2 else -1.0, np.float32),
            one.request,
            one.sample,
        )
        for one in done
    ]
    backend.train(rows, step)
    return middle - start, time.monotonic() - middle


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument(
        "--groups", type=int, default=16, help="prompts of a step, 8 completions each"
    )
    parser.add_argument("--tokens", type=int, default=80)
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    (function,) = own_functions(configuration("own"))
    started = time.monotonic()
    prove(function)
    proof = time.monotonic() - started
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LOSSES}
    with backends() as made:
        for pair in range(1 + arguments.pairs):  # the first warms up
            for name in sorted(LOSSES, reverse=bool(pair % 2)):
                seconds[name].append(one_step(made[name], pair, arguments.groups, arguments.tokens))
        states = [
            {key: value.detach().clone() for key, value in made[name]._adapter.parameters.items()}
            for name in LOSSES
        ]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items()), (
        "both must learn the same"
    )
    rows = []
    for what, of in (("whole step", sum), ("learning", lambda parts: parts[1])):
        built_in, own = (
            [float(of(parts)) for parts in seconds[name][1:]] for name in ("built in", "own")
        )
        median, low, high, coverage = median_interval(
            [right / left for left, right in zip(built_in, own, strict=True)]
        )
        rows.append(
            [
                what,
                f"{np.median(built_in):.3f}",
                f"{np.median(own):.3f}",
                f"{median:.4f}",
                f"{low:.4f} to {high:.4f} ({coverage:.1%})",
            ]
        )
    size = (
        f"{arguments.groups} x 8 completions of {arguments.tokens} tokens, 2 updates;"
        f" {arguments.pairs} alternating pairs."
    )
    publish(
        "loss-hook",
        "A step with a loss of one's own beside the built-in loss",
        [
            table(["", "built in, s", "own, s", "median ratio", "its interval"], rows),
            (
                f"{size} The adapters are equal to the bit. The proof before a run takes"
                f" {proof * 1000:.0f} ms. torch {torch.__version__}."
            ),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
