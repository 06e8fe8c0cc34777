"""The parts of scripts/gpu15.sh, each in a process of its own: what runs on this GPU, how fast, and
in how much memory.

    scripts/gpu15.sh --device cpu --shapes tiny

A measurement adds a row to table.tsv when it ends, and one that fails adds the reason. The model has
Qwen3-4B's shapes, weights from a seed, an adapter of rank 16 that is not zero, and the lab's
tokenizer. It has no file of weights: transformers makes them on the device. Lengths are forced.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "workers")]

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9728, "rope_theta": 1e6, "max_position_embeddings": 40_960,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "rope_theta": 1e5, "max_position_embeddings": 8192,
    },
}  # fmt: skip
"""Of config.json: Qwen/Qwen3-4B and HuggingFaceTB/SmolLM2-135M."""
SMALLER = {
    "vocab_size": 600, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
"""What `--shapes tiny` puts in their place."""
ENDS = {"tie_word_embeddings": True, "eos_token_id": 258, "pad_token_id": 256}
"""The same in all of them; the ids are the lab's tokenizer's."""
TESTS = ("test_cuda_device", "test_engine_options")
"""Those that run on a GPU where there is one."""
RANK = 16
GIB = 2**30
Found = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    rows: tuple[int, ...]
    """Completions that decode together, in groups of `group`."""
    group: int
    prompt: int
    tokens: int
    long: int
    """Tokens of the long row, its prompt among them."""
    step: tuple[int, int, int]
    """Prompts, completions of each, tokens."""
    run: tuple[int, int, int, int]
    """The same after the number of steps."""
    lab: tuple[int, tuple[str, ...]]
    """Steps, and flags, of the lab's run."""


SIZES = {
    "qwen3-4b": Sizes(
        (8, 32, 128), 8, 256, 256, 16_000, (8, 16, 512), (12, 8, 8, 128),
        (20, ("--evaluation-max-examples", "128")),
    ),
    "tiny": Sizes(
        (4, 8), 4, 16, 8, 64, (2, 4, 8), (3, 2, 4, 8),
        (3, ("--batch-size", "4", "--max-tokens", "48", "--evaluation-max-examples", "8")),
    ),
}  # fmt: skip


class Failed(RuntimeError):
    """A measurement has no figure, for this reason."""


class Part:
    """What the measurements of a part share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.number: int = arguments.part
        self.ends = time.monotonic() + arguments.seconds - 5
        self.device: str = arguments.device
        self.out, self.work = Path(arguments.out), Path(arguments.work)
        self.wheels: str = arguments.wheels
        self.tiny = arguments.shapes == "tiny"
        self.sizes = SIZES[arguments.shapes]

    @property
    def left_s(self) -> float:
        """Seconds for what is begun now; 5 remain to write its row."""
        return max(1.0, self.ends - time.monotonic())

    def measure(
        self, what: str, measurement: Callable[[], tuple[str, Found]], file: str = ""
    ) -> None:
        """Add a row to the table, with the figure that `measurement` returns, or with the reason
        why it failed. Its details go to `file`.
        """
        began = time.monotonic()
        figure, found, state = "-", {}, "done"
        try:
            figure, found = measurement()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the others go on
            traceback.print_exc()
            kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
            state = f"failed: {one_line(f'{kind}{error}')}"
        if file:
            line = {"what": what, "state": state, "wall_s": time.monotonic() - began, **found}
            self.append(file, json.dumps(line, default=str) + "\n")
        self.row(what, figure, state)

    def row(self, what: str, figure: str, state: str) -> None:
        row = "\t".join((str(self.number), what, one_line(figure) or "-", state))
        print(row, flush=True)
        self.append("table.tsv", row + "\n")

    def append(self, file: str, text: str) -> None:
        with (self.out / file).open("a", encoding="utf-8") as opened:
            opened.write(text)

    def model(self, name: str, *, whole: bool = False) -> Path:
        """Write a model's folder: its configuration and the lab's tokenizer, and no weights.
        `whole`: not in small either.
        """
        smaller = SMALLER if self.tiny and not whole else {}
        folder = self.work / (f"{name}-small" if smaller else name)
        if not folder.exists():
            folder.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(ROOT / "retrain" / "assets" / "lab" / file, folder)
            settings = MODELS[name] | smaller | ENDS
            (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    def settings(self, name: str = "qwen3-4b") -> Found:
        """Return the settings of benchmarks/workers, and have transformers make weights from a
        seed wherever it would read them.
        """
        import retrain.system

        retrain.system.prepare_torch()  # before torch is imported, as in a run

        import prepare
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        def seeded(folder: str, *, dtype: Any, **_: Any) -> Any:
            torch.manual_seed(0)
            with torch.device(self.device):
                config = AutoConfig.from_pretrained(folder)
                return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

        AutoModelForCausalLM.from_pretrained = seeded
        on_cpu = self.device == "cpu"
        threads = (
            1 if on_cpu else os.cpu_count() or 1
        )  # one: no worker processes, so a profile sees all
        torch.set_num_threads(threads)
        folder, adapter = self.model(name), self.work / f"{name}-adapter"
        if not adapter.exists():
            prepare.adapter(str(folder), str(adapter))
        return {
            "model": str(folder), "adapter": str(adapter), "rank": RANK,
            "vocabulary": json.loads((folder / "config.json").read_text())["vocab_size"],
            "device": self.device, "dtype": "fp32" if on_cpu else "bf16",
            "torch_dtype": "float32" if on_cpu else "bfloat16", "inference_dtype": "auto",
            "group": self.sizes.group, "prompt_tokens": self.sizes.prompt,
            "threads": threads,
        }  # fmt: skip


def one_line(text: str) -> str:
    return " ".join(text.split())[:200]


# -- 0: the machine --------------------------------------------------------------------------------


def machine(part: Part) -> None:
    if part.wheels:
        part.measure("wheels", functools.partial(install, part))
    if part.device != "cpu":
        part.measure("nvidia-smi", functools.partial(nvidia_smi, part))
    part.measure("versions", functools.partial(versions, part))


def install(part: Part) -> tuple[str, Found]:
    """Install the wheels into a folder of its own, which is on the path of all parts."""
    wheels = [str(path) for path in Path(part.wheels).glob("*.whl")]
    if not wheels:
        raise Failed(f"there are none in {part.wheels}")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links",
        part.wheels, "--no-deps", "--no-compile", "--target", str(part.work / "site"), *wheels,
    ]  # fmt: skip
    output(command, part.left_s)
    importlib.invalidate_caches()
    return f"{len(wheels)} installed", {}


def nvidia_smi(part: Part) -> tuple[str, Found]:
    part.append("machine.txt", output(["nvidia-smi"], part.left_s) + "\n")
    query = "--query-gpu=name,memory.total,driver_version"
    return output(["nvidia-smi", query, "--format=csv,noheader"], part.left_s), {}


def versions(part: Part) -> tuple[str, Found]:
    """Import what a run imports."""
    names = sorted({one.metadata["Name"] for one in importlib.metadata.distributions()})
    lines = [f"{name} {importlib.metadata.version(name)}" for name in names]
    part.append("machine.txt", "\n".join([platform.platform(), sys.version, *lines, ""]))
    import torch
    import transformers

    import retrain.cli.main
    import retrain.run.loop

    assert retrain.cli.main and retrain.run.loop
    if part.device != "cpu" and not torch.cuda.is_available():
        raise Failed(f"torch {torch.__version__} sees no GPU")
    python = platform.python_version()
    return (
        f"Python {python}, torch {torch.__version__}, transformers {transformers.__version__}",
        {},
    )


def output(command: list[str], seconds: float) -> str:
    """Return what a command prints. Raise with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise Failed(f"{command[0]} is not here") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} took more than {seconds:.0f} s") from None
    print(done.stderr, file=sys.stderr)
    if done.returncode:
        last = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        raise Failed(f"exit code {done.returncode}: {last[-1]}")
    return done.stdout.strip()


# -- 1: whole runs ---------------------------------------------------------------------------------


def runs(part: Part) -> None:
    """Whole runs of the lab. They share the GPU, so their times are upper bounds."""
    steps, flags = part.sizes.lab
    with ThreadPoolExecutor() as pool:
        for dtype in ("fp32", "bf16"):
            pool.submit(
                part.measure, f"lab in {dtype}, {steps} steps",
                functools.partial(lab_run, part, dtype, steps, flags),
            )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        pool.submit(
            part.measure, "8 steps, and 4 with 4 resumed",
            functools.partial(resumed, part, flags),
        )  # fmt: skip
        pool.submit(part.measure, "explain Qwen3-4B", functools.partial(explained, part))


def lab_run(part: Part, dtype: str, steps: int, flags: tuple[str, ...]) -> tuple[str, Found]:
    folder = part.work / f"lab-{dtype}"
    train(part, folder, "--dtype", dtype, "--max-steps", str(steps), *flags)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = (
        json.loads((folder / "summary.json").read_text())["evaluation"][when]["pass@1"]
        for when in ("before", "after")
    )
    seconds = sum(record["step_time_s"] for record in records[1:]) / (len(records) - 1)
    trained = [one for one in records if one["ratio_max"] is not None]
    apart = max(max(one["ratio_max"] - 1, 1 - one["ratio_min"]) for one in trained)
    return (
        f"{seconds:.2f} s a step, pass@1 {before:.0%} to {after:.0%}, ratio within {apart:.0e} of 1",
        {},
    )


def resumed(part: Part, flags: tuple[str, ...]) -> tuple[str, Found]:
    """Compare the bytes of two adapters: of a run, and of one that was stopped and resumed."""
    flags = ("--lr-schedule", "constant", "--no-evaluation-at-start", "--no-evaluation-at-end", *flags)  # fmt: skip
    whole, parted = part.work / "whole", part.work / "parted"

    def in_parts() -> None:
        train(part, parted, "--max-steps", "4", *flags)
        train(part, parted, "--max-steps", "8", "--resume", str(parted), *flags)

    with ThreadPoolExecutor() as pool:
        for run in [
            pool.submit(train, part, whole, "--max-steps", "8", *flags),
            pool.submit(in_parts),
        ]:
            run.result()
    one, other = (
        hashlib.sha256((folder / "checkpoints/final/adapter_model.safetensors").read_bytes())
        for folder in (whole, parted)
    )
    if one.digest() != other.digest():
        raise Failed("the adapters have other bytes")
    return f"the same bytes, sha256 {one.hexdigest()[:12]}", {}


def train(part: Part, folder: Path, *flags: str) -> None:
    lab = str(ROOT / "examples" / "lab.toml")
    retrain(part, lab, "--devices", part.device, "--log-dir", str(folder), "--quiet", *flags)


def retrain(part: Part, *arguments: str) -> str:
    """Run the command line; what it prints goes to runs.txt."""
    command = [sys.executable, "-m", "retrain", *arguments]
    printed = ""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=part.left_s, check=False,
        )  # fmt: skip
        printed = done.stdout
    except subprocess.TimeoutExpired as error:
        printed = (error.output or b"").decode()
        raise Failed(
            f"no end within the part's time: {(printed.strip().splitlines() or [''])[-1]}"
        ) from None
    finally:
        part.append("runs.txt", f"$ retrain {' '.join(arguments)}\n{printed}\n")
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {(printed.strip().splitlines() or [''])[-1]}")
    return printed


def explained(part: Part) -> tuple[str, Found]:
    prompts, group, tokens = SIZES["qwen3-4b"].step
    settings = {
        "model": {"model": str(part.model("qwen3-4b", whole=True)), "lora_rank": RANK},
        "data": {"source": "lab"},
        "training": {"batch_size": prompts, "group_size": group, "max_tokens": tokens},
    }
    lines = [
        line
        for name, keys in settings.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    ]
    file = part.work / "qwen3-4b.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    elsewhere = ("--memory-gib", "80") if part.device == "cpu" else ()
    said = retrain(part, "explain", str(file), *elsewhere)
    return next(one_line(line) for line in said.splitlines() if line.split()[:1] == ["peak"]), {}


# -- 2: decoding -----------------------------------------------------------------------------------


def decode(part: Part) -> None:
    settings, sizes = part.settings(), part.sizes
    from device import copy_bandwidth
    from growth_point import Point

    bandwidth = copy_bandwidth(part.device)
    part.row("copy on the device", f"{bandwidth / 1e9:,.0f} GB/s", "done")
    point = Point(settings, {"tokens": sizes.tokens})
    shapes = [(rows, False) for rows in sizes.rows] + [(sizes.rows[1], True)]
    kinds = (("rows of one capacity", False), ("captured steps", True))
    for (rows, ragged), (name, paged) in itertools.product(shapes, kinds):
        part.measure(
            f"{name}, {rows} x {sizes.tokens}{' ragged' * ragged}",
            functools.partial(sampled, part, point, rows, ragged, paged, bandwidth),
            "decode.jsonl",
        )
    part.measure(
        f"kernels of a step, {sizes.rows[1]} rows", functools.partial(profiled, point, sizes),
        "decode.jsonl",
    )  # fmt: skip


def hold_pages(engine: Any, paged: bool) -> None:
    """Choose between pages with captured steps and rows of one capacity, whatever a run takes
    here.
    """
    engine.free_pages()
    engine._options = replace(engine._options, paged=paged)


def sampled(
    part: Part, point: Any, rows: int, ragged: bool, paged: bool, bandwidth: float
) -> tuple[str, Found]:
    """Draw completions twice. The better turn counts; a first one captures steps."""
    from growth_point import best_of

    point.ragged = ragged
    hold_pages(point.backend.engine, paged)
    groups, tokens = rows // part.sizes.group, part.sizes.tokens
    turns = [point.halves(groups, tokens, ["sampling"]) for _ in range(2)]
    found = best_of("sampling", turns)
    share = least_seconds(point, rows, found, bandwidth) / found["seconds"]
    figure = rate(found["drawn"], found["seconds"], found["longest"])
    return f"{figure}, {share:.0%} of the bandwidth, {found['peak_gib']:.1f} GiB", found


def least_seconds(point: Any, rows: int, found: Found, bandwidth: float) -> float:
    """Return the seconds to read, for every token, the weights and what the rows at work hold."""
    from retrain.model.budget import kv_bytes_per_token

    base = point.backend._base
    weights = sum(one.nbytes for one in base.model.parameters() if not one.requires_grad)
    held = found["packed"] - found["drawn"] / 2  # a completion is half there on average
    cached = (
        found["drawn"] * held / rows * kv_bytes_per_token(base.model.config, base.dtype.itemsize)
    )
    return (found["longest"] * weights + cached) / bandwidth


def rate(drawn: int, seconds: float, steps: int) -> str:
    return f"{drawn / seconds:,.0f} tok/s, {1e3 * seconds / steps:.1f} ms a step"


def profiled(point: Any, sizes: Sizes) -> tuple[str, Found]:
    """List the kernels of 16 steps, with the prompts before them."""
    tokens, point.ragged = min(16, sizes.tokens), False
    found = point.profile(sizes.rows[1] // sizes.group, tokens, "sampling")
    kernels = found["kernels"]
    busy = kernels["seconds"] / found["seconds"]
    return f"{kernels['calls'] / tokens:,.0f}, at work {busy:.0%} of the time", found


def continuous(part: Part) -> None:
    transformers_sampler(part, "continuous", "transformers, continuous batching")


def generate(part: Part) -> None:
    transformers_sampler(part, "generate", "transformers, generate")


def transformers_sampler(part: Part, kind: str, words: str) -> None:
    """Measure a sampler of transformers on the model with the adapter as peft serves it."""
    settings, sizes = part.settings(), part.sizes
    import decode_worker

    settings |= {
        "rows": max(sizes.rows), "tokens": sizes.tokens, "page_size": 16 if part.tiny else 256,
        "prefill_tokens": 2048,
    }  # fmt: skip
    run = getattr(decode_worker, kind)(settings)
    for rows in sizes.rows:
        part.measure(
            f"{words}, {rows} x {sizes.tokens}",
            functools.partial(timed, part, settings, run, rows), "decode.jsonl",
        )  # fmt: skip


def timed(part: Part, settings: Found, run: Any, rows: int) -> tuple[str, Found]:
    from device import measured_on
    from job import make_job

    sizes = part.sizes
    for step, tokens in enumerate((4, sizes.tokens)):
        job = make_job(
            settings["vocabulary"], rows // sizes.group, sizes.group, tokens, False, step,
            sizes.prompt,
        )  # fmt: skip
        with measured_on(part.device) as measure:
            made = run(job, step)
    assert made == job.tokens, f"{made} tokens instead of {job.tokens}"
    figure = f"{rate(made, measure.seconds, sizes.tokens)}, {measure.peak_gib:.1f} GiB"
    return figure, vars(measure)


# -- 3: learning -----------------------------------------------------------------------------------


def learn(part: Part) -> None:
    settings = part.settings()
    from retrain.model.load import shared_models

    prompts, group, tokens = part.sizes.step
    with shared_models():
        part.measure(
            f"a row of {part.sizes.long:,} tokens", functools.partial(long_row, part, settings),
            "learn.jsonl",
        )  # fmt: skip
        part.measure(
            f"a step of {prompts} x {group} x {tokens}", functools.partial(step, part, settings),
            "learn.jsonl",
        )  # fmt: skip


def long_row(part: Part, settings: Found) -> tuple[str, Found]:
    """Learn from one row, twice from the start, and compare the adapters' bytes."""
    from growth_point import Point

    tokens, digests = part.sizes.long - part.sizes.prompt, []
    for _ in range(2):
        point = Point(settings, {"tokens": tokens, "group": 1})
        measures, _, _ = point.halves(1, tokens, ["learning"])
        weights = point.backend._weights.parameters.values()
        bytes_of = (one.detach().cpu().numpy().tobytes() for one in weights)
        digests.append(hashlib.sha256(b"".join(bytes_of)).hexdigest())
    found, same = vars(measures["learning"]), digests[0] == digests[1]
    speed = part.sizes.long / found["seconds"]
    figure = f"{found['seconds']:.2f} s, {speed:,.0f} tok/s, {peak(point, found['peak_gib'], sampled=False)}"
    if not same:
        raise Failed(f"another update from the same row; {figure}")
    return f"{figure}, same bytes twice", found


def step(part: Part, settings: Found) -> tuple[str, Found]:
    """Sample a batch and learn from it, as a step of a run does."""
    from growth_point import Point

    prompts, group, tokens = part.sizes.step
    shape = {"batch_size": prompts, "group_size": group}
    point = Point(settings, {"tokens": tokens, "group": group, "training": shape})
    halves = ["sampling", "learning"]
    hold_pages(point.backend.engine, True)
    point.halves(1, 8, halves)  # warms up
    measures, result, _ = point.halves(prompts, tokens, halves)
    found: Found = {half: vars(measure) for half, measure in measures.items()}
    found |= {"ratio_min": result.ratio_min, "ratio_max": result.ratio_max}
    most = max(measure.peak_gib for measure in measures.values())
    times = ", ".join(f"{half} {measure.seconds:.2f} s" for half, measure in measures.items())
    return (
        f"{times}, {peak(point, most, sampled=True)}, ratio {result.ratio_min:.4f} to {result.ratio_max:.4f}",
        found,
    )


def peak(point: Any, gib: float, *, sampled: bool) -> str:
    """Say the peak of tensors beside the predicted one: of a whole step, or without sampling."""
    from retrain.model.memory import predict_memory

    memory = predict_memory(point.backend.config)
    sampling, learning = memory.turns
    predicted = (max(sampling, learning) if sampled else learning) - memory.machine.context
    return f"{gib:.1f} GiB (predicted {predicted / GIB:.1f})"


# -- 4: tests --------------------------------------------------------------------------------------


def tests(part: Part) -> None:
    part.measure("tests of the CUDA path", functools.partial(tested, part))


def tested(part: Part) -> tuple[str, Found]:
    files = [str(ROOT / "tests" / f"{name}.py") for name in TESTS]
    arguments = [
        *files, "-vv", "--tb=line", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(ROOT),
        "-m", "not slow" if part.tiny else "", *([] if part.tiny else ["--timeout=60"]),
    ]  # fmt: skip
    path = part.out / "tests.txt"
    with path.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments], stdout=file, stderr=file, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'benchmarks'}:{os.environ['PYTHONPATH']}"},
            timeout=part.left_s, check=False,
        )  # fmt: skip
    lines = path.read_text(encoding="utf-8").strip().splitlines() or [""]
    if done.returncode:
        bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise Failed(f"{lines[-1].strip('= ')}; {'; '.join(bad)}")
    return lines[-1].strip("= "), {}


# -- 5: whole steps --------------------------------------------------------------------------------


def run(part: Part) -> None:
    steps, prompts, group, tokens = part.sizes.run
    part.measure(
        f"SmolLM2-135M, {steps} steps of {prompts} x {group} x {tokens}",
        functools.partial(trained, part), "step.jsonl",
    )  # fmt: skip


def trained(part: Part) -> tuple[str, Found]:
    steps, *shape = part.sizes.run
    settings = part.settings("smollm2-135m") | problems(part, *shape)
    import step_retrain

    found = step_retrain.setup(settings)({"steps": steps})
    made = found["steps"]
    seconds = sum(one["total"] for one in made[1:]) / (len(made) - 1)
    ratio = max(one["ratio_max"] for one in made if one["ratio_max"] is not None)
    return f"{seconds:.2f} s a step, {found['peak_gib']:.1f} GiB, ratio up to {ratio:.4f}", found


def trl(part: Part) -> None:
    prompts, group, tokens = part.sizes.step
    what = f"TRL, a step of {prompts} x {group} x {tokens}"
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        part.row(what, "-", "left out: trl is not installed")
        return
    part.measure(f"{what}, {version}", functools.partial(trained_by_trl, part), "step.jsonl")


def trained_by_trl(part: Part) -> tuple[str, Found]:
    settings = part.settings() | problems(part, *part.sizes.step)
    import step_trl

    settings |= {"batch": part.sizes.step[1], "checkpointing": True, "continuous": False}
    found = step_trl.setup(settings)({"steps": 1})
    (made,) = found["steps"]
    return (
        f"sample {made['sample']:.2f} s, learn {made['learn']:.2f} s, {found['peak_gib']:.1f} GiB",
        found,
    )


def problems(part: Part, prompts: int, group: int, tokens: int) -> Found:
    """Write as many prompts; the rewards of these steps are drawn at random."""
    data = part.work / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"{n} + {n + 1} =", "answer": "0"}) for n in range(prompts))
    data.write_text("\n".join(lines), encoding="utf-8")
    return {"data": str(data), "prompts": prompts, "group": group, "tokens": tokens}


PARTS: dict[str, Callable[[Part], None]] = {
    "machine": machine, "runs": runs, "decode": decode, "continuous": continuous,
    "generate": generate, "learn": learn, "tests": tests, "run": run, "trl": trl,
}  # fmt: skip


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--part", type=int, required=True, help="its number in the table")
    parser.add_argument("--seconds", type=float, required=True, help="its time limit")
    parser.add_argument("--device", required=True, help="cuda:0 or cpu")
    parser.add_argument("--shapes", choices=SIZES, required=True)
    parser.add_argument("--wheels", required=True, help="folder of wheels to install, or empty")
    parser.add_argument("--out", required=True, help="folder for results")
    parser.add_argument("--work", required=True, help="folder for what the parts share")
    return parser.parse_args(given)


if __name__ == "__main__":
    arguments = parse_arguments()
    PARTS[arguments.name](Part(arguments))
    sys.stdout.flush()
    os._exit(0)  # a thread of continuous batching, or a driver, may never end
