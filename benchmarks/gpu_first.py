"""The first minutes on a GPU: what runs, how fast, and whether it is right. One file, without the
packages that a bare machine may lack.

    # Qwen3-4B's shapes and random weights, under ten minutes
    python benchmarks/gpu_first.py --output first.jsonl
    # the same code without a GPU
    python benchmarks/gpu_first.py --device cpu --shapes tiny

Each probe prints one JSON line; one that fails says so in its line, and the others go on. The
commands of a whole session of 30 minutes; the last two need pydantic:

    python benchmarks/gpu_first.py --output first.jsonl     # 8 minutes
    compute-sanitizer python benchmarks/gpu_first.py --shapes tiny --only replay,learn
    python -m pytest -q tests/test_{cuda_device,engine_options}.py
    python benchmarks/cuda.py --output benchmarks/results   # 8 and 9 minutes
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from retrain.inference_engine.base import NoiseKey, SampleRequest
from retrain.inference_engine.decoder import Decoder
from retrain.inference_engine.fixed_step import Variant
from retrain.inference_engine.paged_run import PagedEngine, PagedRun
from retrain.inference_engine.rows import SampleJob
from retrain.inference_engine.scheduler import DecodeRun
from retrain.model.attention import FusedAttention
from retrain.model.budget import DecodeLimits
from retrain.model.fused import FusedDecoder
from retrain.model.head import Head, score_tokens
from retrain.model.packing import PackedAttention, Segment
from retrain.model.varlen import (
    PagedKernel,
    PagedRows,
    Spans,
    flash,
    flash_paged,
    has_flash,
    plain,
    plain_paged,
    reads_pages,
)

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "vocab_size": 151_936, "hidden_size": 2560, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 9728,
    },
    "tiny": {
        "vocab_size": 600, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96,
    },
}  # fmt: skip
OWN = FusedAttention(flash_paged, flash)
"""Attention on a GPU."""
PLAIN = Variant(greedy=False, truncated=False, adapted=True)
NO_END = np.array([2**31 - 1])
_OPENING_S = 120.0
"""Seconds for another process to start and answer."""
Found = dict[str, Any]


class Machine:
    """The device, the shapes, and the model once it is needed."""

    def __init__(self, device: str, shapes: str) -> None:
        self.device, self.cuda, self.big = (
            torch.device(device),
            device.startswith("cuda"),
            shapes == "qwen3-4b",
        )
        self.shape = SHAPES[shapes]
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.bandwidth = 0.0
        self._model: Any = None

    @property
    def model(self) -> Any:
        """A causal language model with a LoRA adapter of rank 16 that is not zero."""
        if self._model is None:
            from peft import LoraConfig, get_peft_model
            from transformers import AutoModelForCausalLM, Qwen3Config

            torch.manual_seed(0)
            config = Qwen3Config(
                **self.shape,
                tie_word_embeddings=True,
                rope_theta=1e6,
                max_position_embeddings=40_960,
            )
            with self.device:
                model = (
                    AutoModelForCausalLM.from_config(config, dtype=self.dtype)
                    .requires_grad_(False)
                    .eval()
                )
            self._model = get_peft_model(
                model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=LAYERS)
            ).eval()
            for name, parameter in self._model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, 0, 0.01)
        return self._model

    def clock(self, run: Callable[[], object], times: int = 1) -> float:
        """Milliseconds of one run."""
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            run()
        self.wait()
        return 1e3 * (time.perf_counter() - start) / times

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def kernels(self, run: Callable[[], object]) -> Found:
        """Kernels of a run on CUDA, operators on a CPU: how many, their milliseconds, and the five
        that take most.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])],
            acc_events=True,
        ) as found:
            run()
            self.wait()
        wanted = DeviceType.CUDA if self.cuda else DeviceType.CPU
        events = [event for event in found.key_averages() if event.device_type == wanted]
        times = {
            event.key: (
                (event.self_device_time_total if self.cuda else event.self_cpu_time_total) / 1e3
            )
            for event in events
        }
        top = sorted(times, key=lambda name: -times[name])[:5]
        total = {"kernels": sum(event.count for event in events), "kernel_ms": sum(times.values())}
        return total | {"top": {name[:60]: round(times[name], 3) for name in top}}


def environment(machine: Machine) -> Found:
    """Versions, and the ceilings of this device: bytes a second of a large copy, products in
    bf16.
    """
    found: Found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    found |= {
        "flash": has_flash(machine.device.type, torch.bfloat16),
        "flash_reads_pages": reads_pages(),
    }
    source = torch.zeros(
        2 << 30 if machine.cuda else 64 << 20, dtype=torch.uint8, device=machine.device
    )
    target = torch.empty_like(source)
    target.copy_(source)
    machine.bandwidth = 2 * source.nbytes / machine.clock(lambda: target.copy_(source), 10) * 1e3
    size = 8192 if machine.big and machine.cuda else 256
    square = torch.randn(size, size, device=machine.device, dtype=machine.dtype)
    square @ square
    tera = 2 * size**3 / machine.clock(lambda: square @ square, 10) / 1e9
    if machine.cuda:
        card = torch.cuda.get_device_properties(machine.device)
        found |= {"name": card.name, "gib": card.total_memory / 2**30}
    return found | {"copy_GB_per_s": machine.bandwidth / 1e9, "tera_flops": tera}


def attention(machine: Machine) -> Found:
    """Flash kernels beside the plain form: whole rows, windows, and decoding over pages; a row
    alone gives the same bits.
    """
    heads, key_heads, size = (
        machine.shape["num_attention_heads"],
        machine.shape["num_key_value_heads"],
        machine.shape["head_dim"],
    )
    make = lambda *shape: torch.randn(*shape, device=machine.device, dtype=machine.dtype)  # noqa: E731
    found: Found = {}
    over_pages: dict[str, PagedKernel] = {"plain": plain_paged}
    over_pages |= {"flash": flash_paged} if machine.cuda and reads_pages() else {}
    for window in (None, 100):
        spans = Spans.of([64, 1, 300], [164, 40, 300], machine.device)
        packed = make(365, heads, size), make(504, key_heads, size), make(504, key_heads, size)
        kernel = OWN.packed_kernel(packed[0], None) if machine.cuda else plain
        assert kernel is not None, f"no packed kernel for {machine.dtype}"
        difference = kernel(*packed, spans, 0.1, window) - plain(*packed, spans, 0.1, window)
        found[f"packed, window {window}"] = float(difference.abs().max())
        keys, values = make(33, 256, key_heads, size), make(33, 256, key_heads, size)
        table = torch.arange(1, 33, device=machine.device, dtype=torch.int32).view(4, 8)
        lengths = torch.tensor([700, 1, 256, 2000], device=machine.device, dtype=torch.int32)
        one, rows = make(4, heads, size), PagedRows.of(table, lengths, 256)
        expected = plain_paged(one.float(), keys.float(), values.float(), rows, 0.1, window)
        for name, paged in over_pages.items():
            together = paged(one, keys, values, rows, 0.1, window)
            found[f"{name} over pages, window {window}"] = float(
                (together.float() - expected).abs().max()
            )
            alone = paged(
                one[3:], keys, values, PagedRows.of(table[3:], lengths[3:], 256), 0.1, window
            )
            found[f"{name} over pages, window {window}, a row alone has the same bits"] = bool(
                torch.equal(alone[0], together[3])
            )
    return found


def prepared(
    machine: Machine, rows: int, prompt: int, tokens: int
) -> tuple[Decoder, PagedEngine, list[SampleJob]]:
    fused = FusedDecoder.of(machine.model.get_base_model(), merge=False)
    assert fused is not None, "the fused forward pass does not reproduce the model"
    decoder = Decoder(machine.model, has_flash(machine.device.type, machine.dtype), fused)
    rng = np.random.default_rng(0)
    prompts = [
        rng.integers(3, machine.shape["vocab_size"], prompt - 7 * (i % 5)).astype(np.int32)
        for i in range(-(-rows // 8))
    ]
    jobs = [
        SampleJob(
            i // 8,
            SampleRequest(prompts[i // 8], 8, tokens, 1.0, NoiseKey(0, 0, 0, i // 8)),
            i % 8,
            tokens,
        )
        for i in range(rows)
    ]
    page = 256 if machine.big else 16
    most = (prompt + tokens + 2 * page) * (rows + 1)
    return (
        decoder,
        PagedEngine(
            decoder, DecodeLimits(rows, most), NO_END, prompt + tokens + 1, page, keeps_prompts=True
        ),
        jobs,
    )


@contextmanager
def stepping(machine: Machine, rows: int) -> Iterator[tuple[Decoder, PagedEngine, list[SampleJob]]]:
    """A decoder whose next step is one of `rows` completions."""
    decoder, engine, jobs = prepared(
        machine, rows, 256 if machine.big else 40, 600 if machine.big else 40
    )
    with decoder.sampling(0):
        run = PagedRun(decoder, jobs, engine)
        run.admit()
        run.grow()
        yield decoder, engine, jobs
        run.close()


def replay(machine: Machine) -> Found:
    """Milliseconds, kernels and share of the bandwidth of one step at many rows, called and, on
    CUDA, as a captured graph.
    """
    found: Found = {}
    for rows in (8, 32, 64, 128) if machine.big else (2, 4):
        with stepping(machine, rows) as (decoder, engine, jobs):
            called = machine.clock(
                lambda rows=rows, engine=engine: engine.step.step(rows, PLAIN), 3
            )
            launched = lambda rows=rows, engine=engine: engine.step.launch(rows, PLAIN)  # noqa: E731
            capture = machine.clock(launched)
            replayed = machine.clock(launched, 30 if machine.big else 3)
            counted = machine.kernels(launched)
        weights = sum(parameter.nbytes for parameter in decoder._base.parameters())
        cache = engine.pool.nbytes // (engine.pool.pages + 1) // engine.pool.tokens
        held = weights + cache * sum(len(job.request.prompt_ids) + 20 for job in jobs)
        found[f"{rows} rows"] = {
            "called_ms": called, "capture_ms": capture, "replayed_ms": replayed,
            "tok_per_s": 1e3 * rows / replayed,
            "share_of_bandwidth": held / (replayed / 1e3) / machine.bandwidth if machine.bandwidth else None, **counted,
        }  # fmt: skip
    return found


def decode(machine: Machine) -> Found:
    """Whole calls, ragged prompts, of the engine with pages and of the other: seconds of two turns,
    tokens until they differ.
    """
    rows, tokens = (32, 200) if machine.big else (6, 20)
    found: Found = {}
    drawn: dict[str, list[Any]] = {}
    for name in ("pages", "rows of one capacity"):
        decoder, engine, jobs = prepared(machine, rows, 256 if machine.big else 40, tokens)
        seconds = []
        for _ in range(2):
            limits = DecodeLimits(rows, 1 << 20)
            run = (
                PagedRun(decoder, jobs, engine)
                if name == "pages"
                else DecodeRun(decoder, jobs, limits, NO_END, None, None)
            )
            drawn[name] = []
            with decoder.sampling(0):
                seconds.append(
                    machine.clock(lambda run=run, name=name: exhaust(run, drawn[name])) / 1e3
                )
        found[name] = {
            "first_s": seconds[0],
            "second_s": seconds[1],
            "tok_per_s": rows * tokens / seconds[1],
        }
    pairs = [
        (one, other)
        for one in drawn["pages"]
        for other in drawn["rows of one capacity"]
        if key(one) == key(other)
    ]
    same = [
        int((np.append(one.token_ids != other.token_ids, True)).argmax()) for one, other in pairs
    ]
    found["tokens until the two differ, of each"] = [min(same), float(np.mean(same)), tokens]
    first = [
        abs(one.logprobs[:length] - other.logprobs[:length]).max(initial=0)
        for length, (one, other) in zip(same, pairs, strict=True)
    ]
    found["largest log-prob difference until then"] = float(max(first))
    return found


def key(completion: Any) -> tuple[int, int]:
    return completion.request, completion.sample


def exhaust(run: Any, into: list[Any]) -> None:
    while run.unfinished:
        into += run.advance()


def learn(machine: Machine) -> Found:
    """Forward and backward of a 16k row and of ragged groups, and whether bytes come twice: the
    flash kernel and the masked attention.
    """
    fused = FusedDecoder.of(machine.model.get_base_model(), merge=False)
    assert fused is not None
    trained = [parameter for parameter in machine.model.parameters() if parameter.requires_grad]
    head = Head(machine.model.get_base_model().get_output_embeddings().weight)
    long = (
        [Segment(0, 256), Segment(256, 16_128, 0, 256)]
        if machine.big
        else [Segment(0, 16), Segment(16, 100, 0, 16)]
    )
    own = OWN if machine.cuda else FusedAttention(packed=plain, fits=lambda _: True)
    found: Found = {}
    gradients: dict[str, Tensor] = {}
    for name, segments, checkpointed in (
        ("16k row", long, True),
        ("16k row, kept", long, False),
        ("ragged groups", ragged(machine), False),
    ):
        for kind, kernel in (("flash", own), ("masked", FusedAttention())):
            if machine.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

            def run(s=segments, k=kernel, c=checkpointed):
                return one_pass(machine, fused, trained, head, s, k, checkpointed=c)

            try:
                first = machine.clock(run)
                one = run()
                milliseconds = machine.clock(run)
                same = all(map(torch.equal, one, run()))
            except (RuntimeError, torch.OutOfMemoryError) as error:
                found[f"{name}, {kind}"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                )
                continue
            flat = torch.cat([gradient.flatten() for gradient in one])
            base = gradients.setdefault(name, flat)
            found[f"{name}, {kind}"] = {
                "first_ms": first, "ms": milliseconds,
                "tok_per_s": 1e3 * segments[-1].stop / milliseconds, "same_bytes_twice": same,
                "finite": bool(flat.isfinite().all()),
                "difference": float((flat - base).norm() / base.norm()),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if machine.cuda else None,
            }  # fmt: skip
    return found


def ragged(machine: Machine) -> list[Segment]:
    """Four prompts with eight completions each, of other lengths."""
    rng, segments, start = np.random.default_rng(1), [], 0
    for _ in range(4 if machine.big else 2):
        prompt = Segment(start, int(rng.integers(90, 250) if machine.big else rng.integers(4, 9)))
        segments.append(prompt)
        for _ in range(8 if machine.big else 3):
            size = int(rng.integers(150, 700) if machine.big else rng.integers(5, 30))
            segments.append(Segment(segments[-1].stop, size, prompt.start, prompt.length))
        start = segments[-1].stop
    return segments


def one_pass(
    machine: Machine,
    fused: FusedDecoder,
    trained: list[Tensor],
    head: Head,
    segments: list[Segment],
    kernel: FusedAttention,
    *,
    checkpointed: bool,
) -> list[Tensor]:
    """The adapter's gradients, with torch told to be deterministic as the learner tells it."""
    for parameter in trained:
        parameter.grad = None
    tokens = segments[-1].stop
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, machine.shape["vocab_size"], (1, tokens), generator=generator).to(
        machine.device
    )
    positions = torch.cat(
        [torch.arange(s.prompt_length, s.prompt_length + s.length) for s in segments]
    )[None].to(machine.device)
    torch.use_deterministic_algorithms(True)
    try:
        fused.refresh()
        batch = PackedAttention(segments, 32_768, kernel, machine.device)
        hidden = fused.hidden_states(ids, positions, batch, checkpointed=checkpointed)[0]
        score_tokens(head, hidden[:-1], ids[0, 1:], 1.0).logprobs.mean().backward()  # type: ignore[no-untyped-call]
    finally:
        torch.use_deterministic_algorithms(False)
    return [parameter.grad.clone() for parameter in trained if parameter.grad is not None]


def handles(machine: Machine) -> Found:
    """Whether another process opens a tensor by its handle; if not, why."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answer_sum, args=(there,), daemon=True)
    process.start()
    there.close()
    ones = torch.ones(1 << 20, device=machine.device)
    here.send(ones)
    answer = here.recv() if here.poll(_OPENING_S) else "no answer"
    return {"opened": answer == len(ones), "answer": answer}


def answer_sum(pipe: Connection) -> None:
    """In the other process: answer with the sum of the tensor that comes, or with the reason why it
    does not.
    """
    try:
        answer = pipe.recv().sum().item()
    except Exception as error:  # noqa: BLE001 - the answer says what it was
        answer = f"{type(error).__name__}: {str(error)[:300]}"
    pipe.send(answer)


PROBES: dict[str, Callable[[Machine], Found]] = {
    "environment": environment, "attention": attention, "replay": replay,
    "decode": decode, "learn": learn, "handles": handles,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--only", default=",".join(PROBES), help="probes, separated by commas")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    arguments = parser.parse_args()
    wanted, failed = set(arguments.only.split(",")), False
    if not wanted <= PROBES.keys():
        parser.error(f"--only {arguments.only}: the probes are {', '.join(PROBES)}")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    machine = Machine(arguments.device, arguments.shapes)
    for name in [name for name in PROBES if name in wanted]:
        started = time.perf_counter()
        try:
            found = PROBES[name](machine)
        except Exception:  # noqa: BLE001 - the other probes go on
            found, failed = {"failed": traceback.format_exc()[-1500:]}, True
        line = json.dumps(
            {"probe": name, "seconds": round(time.perf_counter() - started, 1), **found},
            default=float,
        )
        print(line, flush=True)
        if arguments.output:
            with arguments.output.open("a") as file:
                print(line, file=file)
    sys.exit(failed)


if __name__ == "__main__":
    main()
