"""Decoding, learning and whole steps of a 4B model on a GPU, in one run of under nine minutes that
needs no network and no weights.

    python benchmarks/cuda.py python benchmarks/cuda.py --device cpu --shapes tiny      # a small
    version for a machine without a GPU

The model has Qwen3-4B's shapes and random weights; lengths are forced. Every part is a process of
its own with a time limit: one that fails or runs out of memory leaves a sentence, and the others
continue. Installed peers are measured too. Memory is the peak that torch allocated, and in brackets
the peak that it reserved on the GPU; on a CPU it is resident memory.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from cuda_parts import GROUP, PARTS, RANK, SIZES, TORCH_DTYPES, Bench
from processes import WorkerFailed
from report import add_output, load_average, publish, versions_line

_PREPARING_S = 180


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--shapes", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument(
        "--seconds",
        type=float,
        default=520,
        help="time limit of the whole benchmark; a part that exceeds it is stopped",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument(
        "--peer-python", help="Python of an environment with TRL; default: this one, if it has TRL"
    )
    parser.add_argument(
        "--vllm-python",
        help="Python of an environment with vLLM; default: this one, if it has vLLM",
    )
    add_output(parser)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = sorted(set(arguments.only) - set(PARTS))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is no part; choose from {', '.join(PARTS)}")
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
    return arguments


def python_with(package: str, named: str | None) -> str | None:
    return named or (sys.executable if importlib.util.find_spec(package) else None)


def prepare(bench: Bench) -> None:
    """Write the model and the adapter, and describe the machine."""
    settings = bench.settings
    dtype = TORCH_DTYPES[settings["dtype"]]
    with bench.worker("prepare.py", _PREPARING_S) as worker:
        bench.machine |= worker.ask(make="machine", device=settings["device"])
        made = {
            "folder": settings["model"],
            "adapter": settings["adapter"],
            "name": settings["shapes"],
            "context": bench.sizes.context,
        }
        shape = worker.ask(make="shape", **made, dtype=dtype, device=settings["device"])
    settings["vocabulary"] = shape["vocabulary"]
    bench.machine |= {"weights": shape["weight_bytes"], "kv": shape["kv_bytes"]}


def sections(bench: Bench, only: Sequence[str]) -> list[str]:
    paragraphs: list[str] = []
    for name in [name for name in PARTS if name in only]:
        bench.failures = []
        paragraphs += bench.attempt(name, lambda part=PARTS[name]: part(bench)) or [
            f"## {name.capitalize()}"
        ]
        paragraphs += [f"Failed: {failure}." for failure in bench.failures]
        print(
            f"{name}: {time.monotonic() - bench.started:.0f} s from the start",
            file=sys.stderr,
            flush=True,
        )
    return paragraphs


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    on_cpu = arguments.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": f"{folder}/model", "adapter": f"{folder}/adapter", "shapes": arguments.shapes,
            "device": arguments.device,
            "dtype": "fp32" if on_cpu else "bf16", "rank": RANK, "group": GROUP,
            "prompt_tokens": 16, "threads": arguments.threads,
            **({} if on_cpu else {"memory_limit_gib": None}),
        }  # fmt: skip
        bench = Bench(
            SIZES[arguments.shapes],
            settings,
            python_with("trl", arguments.peer_python),
            python_with("vllm", arguments.vllm_python),
            arguments.seconds,
        )
        try:
            prepare(bench)
        except WorkerFailed as error:
            sys.exit(f"No model could be made on --device {arguments.device}: {error.sentence}.")
        paragraphs = sections(bench, arguments.only)
    where = "on a CPU" if on_cpu else "on a GPU"
    publish(
        f"cuda-{arguments.shapes}{'-cpu' if on_cpu else ''}",
        f"Sampler and learner {where}, {arguments.shapes} with random weights",
        [
            f"{bench.machine['device'] or 'The processor'}. {versions_line(*bench.versions)}.",
            *paragraphs,
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
