"""A whole training step of `retrain.train` compared with TRL's GRPOTrainer: seconds by phase, and
memory.

    python benchmarks/step.py --model models/smollm2-135m --peer-python .venv-peers/bin/python

Both read the same model folder, made from --model. Its end-of-sequence token is one that the model
does not draw, and its chat template writes only the prompt, so that all completions have full
length (the table shows the mean length). Both use the same prompts at each step, random rewards,
LoRA on every linear layer, AdamW, and the mean over the tokens of the batch. Each setting runs in
its own process, one at a time; the first step warms up, and the best of the others counts. Memory
is the peak resident memory from loading the model to the last step. For TRL "learn" is the step
without its sampling.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Worker, WorkerFailed
from report import add_output, load_average, publish, table, versions_line

from retrain.model.text import resolve_model

_STORY = (
    "A farmer has {a} baskets with {b} apples in each of them. On Monday she sells {c} apples at"
    " the market for {d} cents each, and on Tuesday she gives one third of what is left to her"
    " neighbour. Then a friend brings {e} more baskets of the same size. How many apples does she"
    " have in the end, and how much money did she earn on Monday? Explain each step before you give"
    " the answer."
)


def story_prompts(count: int) -> list[str]:
    return [_STORY.format(a=11 + i, b=21 + i, c=31 + i, d=41 + i, e=51 + i) for i in range(count)]


@dataclass
class Setting:
    name: str
    python: str
    script: str
    settings: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def best(self) -> dict[str, Any]:
        """The fastest of the steps with the most rows: a group whose rewards happen to be equal is
        not trained on.
        """
        return min(self.steps, key=lambda step: (-step["trained"], step["total"]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lab", help='a model folder, or "lab"')
    parser.add_argument("--rank", type=int, default=16, help="0 trains all weights")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=2, help="steps in one process, the first of which warms up"
    )
    parser.add_argument("--repeats", type=int, default=1, help="processes of each setting")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--inference-dtypes",
        nargs="+",
        default=["auto"],
        choices=("auto", "bf16"),
        help="retrain's, one setting each",
    )
    parser.add_argument(
        "--peer-python",
        default=".venv-peers/bin/python",
        help="python of an environment with benchmarks/peers.txt",
    )
    parser.add_argument(
        "--trl",
        nargs="*",
        default=["4", "8", "32", "4c", "8c", "32c"],
        help=(
            "TRL's per-device batches; c: gradient checkpointing on, b: transformers' continuous"
            " batching samples"
        ),
    )
    add_output(parser)
    return parser.parse_args()


def make_settings(arguments: argparse.Namespace, common: dict[str, Any]) -> list[Setting]:
    made = []
    for dtype in arguments.inference_dtypes:
        name = "retrain" if dtype == "auto" else f"retrain, decoding in {dtype}"
        made.append(
            Setting(name, sys.executable, "step_retrain.py", {**common, "inference_dtype": dtype})
        )
    for variant in arguments.trl:
        batch = int(variant.rstrip("cb"))
        chosen = {"batch": batch, "checkpointing": "c" in variant, "continuous": "b" in variant}
        name = (
            "TRL, batch"
            f" {batch}{', checkpointing' if 'c' in variant else ''}{', continuous batching' if 'b' in variant else ''}"
        )
        made.append(Setting(name, arguments.peer_python, "step_trl.py", {**common, **chosen}))
    return made


def measure(setting: Setting, steps: int) -> dict[str, str]:
    """Runs one process of this setting; returns the versions it found."""
    try:
        with Worker(setting.python, setting.script, setting.settings) as worker:
            answer = worker.ask(steps=steps)
            versions = worker.versions
    except WorkerFailed as error:
        if not error.out_of_memory:
            raise
        setting.failure = "not enough memory"
        return {}
    setting.steps += answer["steps"][1:] or answer["steps"]
    setting.peaks.append(answer["peak_gib"])
    return versions


def rows(settings: list[Setting]) -> list[list[str]]:
    ours, memory = settings[0].best["total"], min(settings[0].peaks)
    lines = []
    for setting in settings:
        if not setting.steps:
            lines.append([setting.name, setting.failure, *["-"] * 7])
            continue
        best = setting.best
        other = best["total"] - best["sample"] - best["learn"]
        lines.append(
            [
                setting.name, f"{best['total']:.2f}", f"{ours / best['total']:.2f}",
                f"{best['sample']:.2f}", f"{best['learn']:.2f}",
                f"{other:.2f}", f"{min(setting.peaks):.2f}", f"{memory / min(setting.peaks):.2f}",
                f"{best['trained']} x {best['mean_tokens']:.1f}",
            ]
        )  # fmt: skip
    return lines


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    prompts = story_prompts(arguments.prompts)
    versions: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text(
            "".join(json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts),
            encoding="utf-8",
        )
        common: dict[str, Any] = {
            "model": str(Path(folder) / "model"),
            "data": str(data),
            "rank": arguments.rank,
            "prompts": arguments.prompts,
            "group": arguments.group,
            "tokens": arguments.tokens,
            "threads": arguments.threads,
        }
        with Worker(sys.executable, "prepare.py", common) as prepare:
            prepare.ask(
                make="endless",
                model=str(Path(resolve_model(arguments.model)).resolve()),
                folder=common["model"],
                prompts=prompts,
            )
        settings = make_settings(arguments, common)
        for _ in range(arguments.repeats):
            versions += [measure(setting, arguments.steps) for setting in settings]
    head = ["setting", "seconds per step", "retrain's / its", "sample", "learn", "other", "peak GiB",
            "retrain's / its", "rows x mean tokens"]  # fmt: skip
    name = Path(arguments.model).name
    full = "" if arguments.rank else "full-"
    what = f"LoRA r{arguments.rank} on every linear layer" if arguments.rank else "all weights"
    publish(
        f"step-{full}{name}-{arguments.prompts}x{arguments.group}x{arguments.tokens}",
        f"A whole step, {name}, {arguments.prompts} prompts x {arguments.group} completions x"
        f" {arguments.tokens} tokens",
        [
            (
                f"fp32, {what}, {arguments.threads} threads, best of"
                f" {arguments.repeats} x {arguments.steps - 1} steps after a warm-up step."
                f" {versions_line(*versions)}."
            ),
            table(head, rows(settings)),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
