"""The parts of cuda.py. Each runs its own worker processes and returns its section of the
report.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from learn import relative_error
from processes import Worker, WorkerFailed
from report import table
from safetensors.numpy import load_file
from step import story_prompts
from vllm_server import VllmServer
from workers.job import make_job

RANK, GROUP = 16, 8
TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PUBLISHED = [
    "prime-rl on one H100: published, not measured here",
    "",
    "16,384",
    "",
    "",
    "6,230",
    "23.3",
    "",
    "",
]
_PROFILED_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    decode_rows: tuple[int, ...]
    prompt_tokens: int
    decode_tokens: int
    learn: tuple[tuple[int, int], ...]
    """(rows, tokens of each with its prompt): as many tokens in all at each length."""
    steps: tuple[tuple[int, int, int], ...]
    """(prompts, completions of each, tokens)"""
    slice_layers: int
    slice_tokens: int
    context: int
    """Of the model, in tokens."""


SIZES = {
    "qwen3-4b": Sizes(
        (32, 64, 128),
        256,
        512,
        ((64, 1024), (16, 4096), (4, 16_384)),
        ((4, 8, 128), (8, 16, 1024)),
        2,
        128,
        40_960,
    ),
    "tiny": Sizes((8, 16), 16, 16, ((8, 64), (4, 128), (2, 256)), ((2, 4, 8),), 1, 16, 2048),
}
LIMITS = {
    "decode": 130,
    "generate": 60,
    "vllm": 150,
    "learn": 150,
    "parity": 60,
    "step": 170,
    "profile": 90,
}
"""Time limit of one process in seconds, its start included."""


class Bench:
    """What the parts share, and what they add to the report."""

    def __init__(
        self,
        sizes: Sizes,
        settings: dict[str, Any],
        trl_python: str | None,
        vllm_python: str | None,
        seconds: float,
    ) -> None:
        self.sizes, self.settings = sizes, settings
        self.trl_python, self.vllm_python = trl_python, vllm_python
        self.started = time.monotonic()
        self._deadline = self.started + seconds
        self.machine: dict[str, Any] = {}
        """device, bandwidth (bytes a second), weights (bytes), kv (bytes a token)."""
        self.versions: list[Mapping[str, str]] = []
        self.failures: list[str] = []
        """Of the current part."""

    def seconds_of(self, limit: float) -> float:
        """`limit`, or the time that is left if that is less; on a CPU, where time is not scarce,
        all that is left.
        """
        left = max(1.0, self._deadline - time.monotonic())
        return left if self.settings["device"] == "cpu" else min(limit, left)

    @contextmanager
    def worker(
        self, script: str, seconds: float, *, python: str = sys.executable, **settings: Any
    ) -> Iterator[Worker]:
        with Worker(
            python, script, {**self.settings, **settings}, seconds=self.seconds_of(seconds)
        ) as worker:
            self.versions.append(worker.versions)
            yield worker

    def attempt(self, what: str, measure: Callable[[], Any]) -> Any:
        """The result of `measure`; None if it failed, with the reason in `failures`."""
        try:
            return measure()
        except (WorkerFailed, OSError) as error:
            self.failures.append(
                f"{what}: {error.sentence if isinstance(error, WorkerFailed) else error}"
            )
            return None


# -- decoding --------------------------------------------------------------------------------------


def decode(bench: Bench) -> list[str]:
    sizes, machine = bench.sizes, bench.machine
    answers: list[tuple[str, int, dict[str, Any]]] = []
    bench.attempt("retrain", partial(_engine, bench, answers))
    fused = all(found["fused"] for _, _, found in answers)
    rows = sizes.decode_rows[0]
    if generated := bench.attempt("generate", partial(_generate, bench, rows)):
        answers.append(("generate", rows, generated))
    if bench.vllm_python and (served := bench.attempt("vLLM", partial(_vllm, bench, rows))):
        answers.append(("vLLM", rows, served))
    lines = [_decode_line(bench, *answer) for answer in answers]
    if not bench.vllm_python:
        lines.append(["vLLM", "not installed", *[""] * 7])
    head = [
        "sampler",
        "rows",
        "seconds",
        "first turn",
        "tok/s",
        "ms per step",
        "memory bound, ms",
        "bound / time",
        "GiB",
    ]
    return [
        "## Decoding",
        (
            f"{sizes.decode_tokens} tokens after prompts of {sizes.prompt_tokens}, groups of"
            f" {GROUP}, with the adapter, "
            f"{bench.settings['dtype']}; the better of two beside the first. Ragged: prompts of"
            " half to all of these tokens and "
            "completions of an eighth to all, other lengths in each turn, and rows that are done"
            " give way. A decoding step reads "
            f"{machine['weights'] / 1e9:.2f} GB of weights, and {machine['kv']:,} bytes of keys and"
            " values per cached token; the memory "
            f"bound assumes the {machine['bandwidth'] / 1e9:,.0f} GB/s of a large copy here."
            f"{'' if fused else ' The fused forward pass was not used: it did not reproduce the model.'}"
        ),
        table(head, lines),
    ]


def _engine(bench: Bench, answers: list[tuple[str, int, dict[str, Any]]]) -> None:
    sizes = bench.sizes
    with bench.worker("growth_point.py", LIMITS["decode"]) as worker:
        for rows, ragged in [
            (rows, ragged) for ragged in (True, False) for rows in sizes.decode_rows
        ]:
            shape = {
                "completions": rows,
                "tokens": sizes.decode_tokens,
                "prompt_tokens": sizes.prompt_tokens,
                "ragged": ragged,
            }
            found = worker.ask(**shape, halves=["sampling"], repeats=2)
            answers.append(
                (f"retrain, {'ragged' if ragged else 'even'}", rows, found | found["sampling"])
            )


def _generate(bench: Bench, rows: int) -> dict[str, Any]:
    sizes, dtype = bench.sizes, TORCH_DTYPES[bench.settings["dtype"]]
    settings = {
        "prompts": rows // GROUP,
        "kind": "generate",
        "torch_dtype": dtype,
        "prompt_tokens": sizes.prompt_tokens,
    }
    with bench.worker("decode_worker.py", LIMITS["generate"], **settings) as worker:
        worker.ask(step=0, ragged=False, tokens=4)
        return worker.ask(step=1, ragged=False, tokens=sizes.decode_tokens)


def _vllm(bench: Bench, rows: int) -> dict[str, Any]:
    assert bench.vllm_python is not None
    settings, tokens, prompt_tokens = (
        bench.settings,
        bench.sizes.decode_tokens,
        bench.sizes.prompt_tokens,
    )
    with VllmServer.start(
        bench.vllm_python, settings["model"], settings["adapter"],
        dtype=TORCH_DTYPES[settings["dtype"]], compiled=True, rows=rows,
        context=prompt_tokens + tokens + 16, threads=settings["threads"],
        seconds=bench.seconds_of(LIMITS["vllm"]),
    ) as server:  # fmt: skip
        bench.versions.append(server.fetch_versions())
        shape = settings["vocabulary"], rows // GROUP, GROUP, tokens, False
        jobs = [make_job(*shape, step, prompt_tokens) for step in (0, 1)]
        return {"seconds": [server.sample(job) for job in jobs][-1]}


def _decode_line(bench: Bench, name: str, rows: int, found: dict[str, Any]) -> list[str]:
    sizes, machine, seconds = bench.sizes, bench.machine, found["seconds"]
    steps, drawn = (
        found.get("longest", sizes.decode_tokens),
        found.get("drawn", rows * sizes.decode_tokens),
    )
    prompts = found["packed"] - drawn if "packed" in found else rows * sizes.prompt_tokens
    cached = (
        drawn / steps * (prompts / rows + drawn / rows / 2)
    )  # rows at work in a step, and what each of them holds
    allowed = (machine["weights"] + cached * machine["kv"]) / machine["bandwidth"]
    step, first = seconds / steps, found.get("first_seconds", seconds)
    return [
        name, f"{rows}", f"{seconds:.2f}", f"{first:.2f}", f"{drawn / seconds:,.0f}",
        f"{1e3 * step:.2f}", f"{1e3 * allowed:.2f}",
        f"{100 * allowed / step:.0f}%", _memory(found),
    ]  # fmt: skip


def _memory(measure: dict[str, Any]) -> str:
    reserved = measure.get("reserved_gib", math.nan)
    taken = "" if math.isnan(reserved) else f" ({reserved:.2f})"
    return f"{measure['peak_gib']:.2f}{taken}" if "peak_gib" in measure else ""


# -- learning --------------------------------------------------------------------------------------


def learn(bench: Bench) -> list[str]:
    sizes, lines = bench.sizes, []
    longest = sizes.learn[-1]
    one_row = {"micro_batch_tokens": longest[1], "gradient_checkpointing": True}
    cases = [("retrain, as it chooses", shape, {}, False) for shape in sizes.learn]
    cases += [
        ("retrain, one row per pass", longest, one_row, False),
        ("retrain, ragged groups", sizes.learn[0], {}, True),
    ]

    def ours() -> None:
        with bench.worker("growth_point.py", LIMITS["learn"]) as worker:
            for name, (rows, length), training, ragged in cases:
                shape = {
                    "completions": rows,
                    "tokens": length - sizes.prompt_tokens,
                    "prompt_tokens": sizes.prompt_tokens,
                }
                shape |= {"group": GROUP if ragged else 1, "ragged": ragged}
                found = worker.ask(**shape, repeats=2, halves=["learning"], training=training)
                lines.append(_learn_line(name, rows, length, found))

    bench.attempt("retrain", ours)
    head = [
        "trainer",
        "rows",
        "tokens each",
        "seconds",
        "first turn",
        "tok/s",
        "GiB",
        "micro-batch tokens",
        "ratio, furthest from 1",
    ]
    return [
        "## Learning",
        (
            f"One optimizer step, LoRA r{RANK} on every linear layer, {bench.settings['dtype']};"
            f" every row has its own prompt of {sizes.prompt_tokens} tokens, and tokens count the"
            " prompts. Ragged groups share theirs, of up to as many tokens, which count for each"
            " row. The better of two, after a small one, beside the first. prime-rl's figure is of"
            " Qwen3-4B with LoRA r16 at 16k context."
        ),
        table(head, [*lines, PUBLISHED]),
    ]


def _learn_line(name: str, rows: int, length: int, found: dict[str, Any]) -> list[str]:
    measure = found["learning"]
    return [
        name, f"{rows}", f"{length:,}", f"{measure['seconds']:.2f}",
        f"{measure['first_seconds']:.2f}",
        f"{measure['packed'] / measure['seconds']:,.0f}", _memory(measure), found["micro_batch"],
        f"{found['ratio_max']:.6f}",
    ]  # fmt: skip


# -- parity ----------------------------------------------------------------------------------------


def parity(bench: Bench) -> list[str]:
    """On the first layers in fp32: loss and gradient compared with each row alone, and the ratio of
    freshly sampled rows.
    """
    sizes, settings = bench.sizes, bench.settings
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {
            "model": str(folder / "model"),
            "adapter": str(folder / "adapter"),
            "dtype": "fp32",
        }
        with bench.worker("prepare.py", LIMITS["parity"]) as prepare:
            made = {
                "folder": model["model"],
                "adapter": model["adapter"],
                "name": settings["shapes"],
                "context": sizes.context,
            }
            prepare.ask(make="shape", **made, layers=sizes.slice_layers, device=settings["device"])
        bench.attempt("gradient", lambda: lines.extend(_gradients(bench, model, folder)))
        bench.attempt("ratio", lambda: lines.extend(_ratio(bench, model)))
    return [
        "## Parity",
        (
            f"The first {sizes.slice_layers} layers with embedding and head in fp32, 4 x {GROUP}"
            f" completions of up to {sizes.slice_tokens} tokens."
        ),
        table(["what", "found", "allowed"], lines),
    ]


def _gradients(bench: Bench, model: dict[str, str], folder: Path) -> Iterator[list[str]]:
    losses, old = {}, str(folder / "logprobs.safetensors")
    common = {
        **model,
        "dtype": "float32",
        "prompts": 4,
        "tokens": bench.sizes.slice_tokens,
        "ragged": True,
        "logprobs": old,
    }
    common |= {"training": {}}
    for kind in ("reference", "retrain"):
        with bench.worker("learn_worker.py", LIMITS["parity"], **common, kind=kind) as worker:
            losses[kind] = worker.ask(gradient=str(folder / f"{kind}.safetensors"), logprobs=old)[
                "loss"
            ]
    error = relative_error(
        load_file(folder / "retrain.safetensors"), load_file(folder / "reference.safetensors")
    )
    yield [
        "gradient, relative to each row alone through peft and transformers",
        f"{error:.1e}",
        "1e-5",
    ]
    yield [
        "loss, difference from the same",
        f"{abs(losses['retrain'] - losses['reference']):.1e}",
        "1e-5",
    ]


def _ratio(bench: Bench, model: dict[str, str]) -> Iterator[list[str]]:
    with bench.worker("growth_point.py", LIMITS["parity"], **model) as worker:
        found = worker.ask(completions=4 * GROUP, tokens=bench.sizes.slice_tokens)
    farthest = max(found["ratio_max"] - 1, 1 - found["ratio_min"])
    yield [
        "ratio of freshly sampled rows before the first update, furthest from 1",
        f"{farthest:.1e}",
        "1e-4",
    ]


# -- a whole step ----------------------------------------------------------------------------------


def step(bench: Bench) -> list[str]:
    trainers: list[tuple[str, str, str, dict[str, Any]]] = [
        (
            "retrain",
            sys.executable,
            "step_retrain.py",
            {"inference_dtype": "auto", "dtype": bench.settings["dtype"]},
        )
    ]
    if bench.trl_python:
        peer = {"batch": 8, "checkpointing": True, "continuous": False}
        trainers.append(("TRL, batch 8, checkpointing", bench.trl_python, "step_trl.py", peer))
    lines = []
    for shape in bench.sizes.steps:
        for name, *trainer in trainers:
            words = " x ".join(f"{number:,}" for number in shape)
            if found := bench.attempt(f"{name}, {words}", partial(_steps, bench, shape, *trainer)):
                lines.append(_step_line(name, words, found))
    if not bench.trl_python:
        lines.append(["TRL", "not installed", *[""] * 7])
    head = [
        "trainer",
        "shape",
        "seconds per step",
        "sample",
        "learn",
        "other",
        "GiB",
        "rows x mean tokens",
        "ratio, furthest from 1",
    ]
    return [
        "## A whole step",
        (
            f"Prompts x completions x tokens, {bench.settings['dtype']}, LoRA r{RANK}, random"
            " rewards, the second of two steps. A group whose rewards are all equal is not"
            " trained on."
        ),
        table(head, lines),
    ]


def _steps(
    bench: Bench, shape: tuple[int, int, int], python: str, script: str, settings: dict[str, Any]
) -> dict[str, Any]:
    prompts, group, tokens = shape
    data = Path(bench.settings["model"]) / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in story_prompts(prompts)
        ),
        encoding="utf-8",
    )
    sizes = {"data": str(data), "prompts": prompts, "group": group, "tokens": tokens}
    with bench.worker(script, LIMITS["step"], python=python, **sizes, **settings) as worker:
        return worker.ask(steps=2)


def _step_line(name: str, shape: str, found: dict[str, Any]) -> list[str]:
    last = found["steps"][-1]
    ratio = last.get("ratio_max")
    return [
        name, shape, f"{last['total']:.2f}", f"{last['sample']:.2f}", f"{last['learn']:.2f}",
        f"{last['total'] - last['sample'] - last['learn']:.2f}", _memory(found),
        f"{last['trained']} x {last['mean_tokens']:.1f}",
        "" if ratio is None else f"{ratio:.6f}",
    ]  # fmt: skip


# -- where the time goes ---------------------------------------------------------------------------


def profile(bench: Bench) -> list[str]:
    sizes = bench.sizes
    tokens = min(_PROFILED_TOKENS, sizes.decode_tokens)
    halves = {
        "sampling": {"completions": sizes.decode_rows[0], "tokens": tokens},
        "learning": {
            "completions": 1,
            "tokens": sizes.learn[-1][1] - sizes.prompt_tokens,
            "group": 1,
        },
    }
    paragraphs, on_cpu = ["## Where the time goes"], bench.settings["device"] == "cpu"

    def ours() -> None:
        with bench.worker("growth_point.py", LIMITS["profile"]) as worker:
            for half, shape in halves.items():
                found = worker.ask(**shape, prompt_tokens=sizes.prompt_tokens, profile=half)
                words = (
                    f"{half.capitalize()}, rows: {shape['completions']}, tokens of each:"
                    f" {shape['tokens']:,}"
                )
                paragraphs.extend(
                    _profile_lines(words, tokens if half == "sampling" else 0, found, on_cpu=on_cpu)
                )

    bench.attempt("retrain", ours)
    return paragraphs


def _profile_lines(words: str, steps: int, found: dict[str, Any], *, on_cpu: bool) -> list[str]:
    """Lines of one profile. Time without a kernel is the host's: Python, launches, waits. On a CPU
    operators stand for kernels.
    """
    kernels = found["kernels"]
    each = f", {kernels['calls'] / steps:,.0f} per step" if steps else ""
    idle = max(0.0, 1 - kernels["seconds"] / found["seconds"])
    lines = [
        [
            f"`{one['name']}`",
            f"{one['calls']:,}",
            f"{1e3 * one['seconds']:.2f}",
            f"{100 * one['seconds'] / kernels['seconds']:.1f}%",
        ]
        for one in kernels["top"]
    ]
    waits = (
        f" The device waits for the host {100 * idle:.0f}% of the time, the most that captured"
        " graphs could save."
    )
    return [
        f"### {words}",
        (
            f"{found['seconds']:.3f} s; kernels {kernels['seconds']:.3f} s, {kernels['calls']:,} of"
            f" them{each}.{'' if on_cpu else waits}"
        ),
        table(["kernel", "calls", "ms", "share"], lines),
    ]


PARTS: dict[str, Callable[[Bench], list[str]]] = {
    "decode": decode,
    "learn": learn,
    "parity": parity,
    "step": step,
    "profile": profile,
}
