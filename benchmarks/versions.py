"""Speed of this checkout compared with an earlier commit's: decoding, the learning pass and whole
steps, by alternating pairs.

    python benchmarks/versions.py --base HEAD~100 --model models/smollm2-135m

Each version runs the workers of its own checkout in a process of its own, with the packages of this
Python; one is stopped by signal while the other computes. The order of a pair alternates, and the
first pair warms up. A ratio is this checkout's seconds to the earlier one's. Its interval is of
order statistics: with ten pairs from the second to the ninth, which holds the median in 97.9% of
cases whatever the distribution is. Whole steps are of problems of the lab, whose completions end
where the model ends them; their sum has the tests that a run makes at some steps.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import make_adapter, settings_of
from processes import WORKERS, Worker
from report import add_output, load_average, median_interval, publish, table

REPOSITORY = WORKERS.parent.parent
RANK = 16
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Part:
    name: str
    script: str
    settings: dict[str, Any]
    request: dict[str, Any]

    def seconds(self, worker: Worker, pair: int, tokens: int, steps: int) -> float:
        """Return the seconds of one turn; of steps those after the first."""
        if self.name == "steps":
            taken = worker.ask(steps=steps)["steps"]
            return sum(float(step["total"]) for step in taken[1:])
        asked = self.request
        if "ragged" in asked:
            length = tokens if pair else _WARM_UP_TOKENS
            asked = {**asked, "step": pair, "tokens": length}
        return float(worker.ask(**asked)["seconds"])


_FP32, _BF16 = ({"kind": "engine", "engine_dtype": dtype} for dtype in ("auto", "bf16"))
PARTS = [
    Part("decoding, even", "decode_worker.py", _FP32, {"ragged": False}),
    Part("decoding, ragged", "decode_worker.py", _FP32, {"ragged": True}),
    Part("decoding in bf16, even", "decode_worker.py", _BF16, {"ragged": False}),
    Part("decoding in bf16, ragged", "decode_worker.py", _BF16, {"ragged": True}),
    Part("learning", "learn_worker.py", {"kind": "retrain", "training": {}}, {}),
    Part("steps", "step_retrain.py", {"inference_dtype": "auto", "data": "lab"}, {}),
]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", commit]
        archive = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def measure(
    part: Part, roots: Sequence[Path], settings: dict[str, Any], count: int, steps: int
) -> list[list[float]]:
    """Return the seconds of each version in `count` pairs after a first one."""
    seconds: list[list[float]] = [[] for _ in roots]
    with ExitStack() as stack:
        workers: list[Worker] = []
        for root in roots:
            worker = Worker(sys.executable, part.script, {**settings, **part.settings}, root=root)
            workers.append(stack.enter_context(worker))
            worker.pause()
        for pair in range(count + 1):
            for version in (0, 1) if pair % 2 else (1, 0):
                workers[version].resume()
                took = part.seconds(workers[version], pair, settings["tokens"], steps)
                workers[version].pause()
                if pair:
                    seconds[version].append(took)
    return seconds


def row(part: Part, earlier: list[float], present: list[float]) -> list[str]:
    ratios = [right / left for left, right in zip(earlier, present, strict=True)]
    median, low, high, coverage = median_interval(ratios)
    return [
        part.name,
        f"{np.median(earlier):.3f}",
        f"{np.median(present):.3f}",
        f"{median:.3f}, {low:.3f} to {high:.3f} ({coverage:.1%})",
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, help="the earlier commit")
    parser.add_argument("--model", default="lab", help='a model folder, or "lab"')
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps of a run, one warms up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of parts' names")
    add_output(parser)
    return parser.parse_args()


def prepared(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings with an adapter, the vocabulary and the log-probs that learning reads."""
    files = {"adapter": str(folder / "adapter"), "logprobs": str(folder / "logprobs.safetensors")}
    made = {**settings, **files}
    made["vocabulary"] = make_adapter(made, made["adapter"])
    with Worker(sys.executable, "learn_worker.py", {**made, "kind": "reference"}) as plain:
        plain.ask(logprobs=made["logprobs"], gradient=str(folder / "gradient.safetensors"))
    return made


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    settings = settings_of(arguments)
    settings |= {
        "tokenizer": settings["model"],
        "rank": RANK,
        "rows": arguments.prompts * arguments.group,
        "ragged": False,
    }
    lines = []
    chosen = [part for part in PARTS if part.name.startswith(tuple(arguments.only))]
    with checkout(arguments.base) as earlier, tempfile.TemporaryDirectory() as folder:
        settings = prepared(settings, Path(folder))
        for part in chosen:
            roots = earlier, REPOSITORY
            seconds = measure(part, roots, settings, arguments.pairs, arguments.steps)
            lines.append(row(part, *seconds))
            print(*lines[-1], sep="  ", file=sys.stderr, flush=True)
    name = Path(arguments.model).name
    shape = f"{arguments.prompts}x{arguments.group}x{arguments.tokens}"
    publish(
        f"versions-{name}-{shape}",
        f"Speed compared with {arguments.base}, {name}, {arguments.prompts} prompts x"
        f" {arguments.group} completions x {arguments.tokens} tokens",
        [
            (
                f"LoRA r{RANK} on every linear layer, {arguments.threads} threads,"
                f" {arguments.pairs} alternating pairs; seconds are medians."
            ),
            table(["", f"{arguments.base}, s", "present, s", "ratio, its interval"], lines),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
