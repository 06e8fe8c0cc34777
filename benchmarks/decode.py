"""Sampling speed of the PyTorch engine, compared with `generate`, transformers' continuous batching
and a vLLM server.

    python benchmarks/decode.py --model models/smollm2-135m --vllm-python .venv-vllm/bin/python

All peers use the same model, adapter, prompts and lengths. Each is a process of its own; they take
turns while the others are stopped by signal, and the best turn counts. Prompts are random token
ids, new at each turn, so that no peer has them in a cache; lengths are forced. In the ragged rows
completions differ in length: `generate` decodes all of them to the longest one, and only the
requested tokens are counted. The engine returns log-prob and entropy of each token, vLLM and
continuous batching the log-prob, `generate` neither.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common import make_adapter, settings_of
from processes import Worker, WorkerFailed, last_line
from report import add_output, load_average, publish, table, versions_line
from vllm_server import VllmServer
from workers.job import make_job

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_WARM_UP_TOKENS = 4


class Pausable(Protocol):
    versions: Any

    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass
class Peer:
    name: str
    process: Pausable
    run: Callable[[int, bool, int], float]
    """(step, ragged, tokens) to the seconds that it took."""
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    def turn(self, step: int, ragged: bool, tokens: int) -> float:
        self.process.resume()
        try:
            return self.run(step, ragged, tokens)
        finally:
            self.process.pause()

    def best(self, ragged: bool) -> float:
        return min(self.seconds[ragged])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lab", help='a model folder, or "lab"')
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--peers", nargs="*", choices=("generate", "continuous"), default=["generate", "continuous"]
    )
    parser.add_argument(
        "--vllm-python",
        help=(
            "python of an environment with vLLM (benchmarks/README.md): a server is started for it"
        ),
    )
    parser.add_argument(
        "--vllm-modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"]
    )
    parser.add_argument(
        "--vllm-url",
        help="a server that runs already, with the adapter of --adapter served as policy",
    )
    parser.add_argument(
        "--adapter", help="PEFT folder; one with random weights is made where it is not given"
    )
    parser.add_argument(
        "--page-size", type=int, default=64, help="KV page of continuous batching, in tokens"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=512,
        help="tokens of a batch of continuous batching at most",
    )
    add_output(parser)
    arguments = parser.parse_args()
    if arguments.vllm_url and (len(arguments.dtypes) > 1 or not arguments.adapter):
        parser.error(
            "--vllm-url serves one dtype and one adapter: name them with --dtypes and --adapter"
        )
    return arguments


@contextmanager
def start_peers(
    arguments: argparse.Namespace, settings: dict[str, Any], dtype: str
) -> Iterator[tuple[list[Peer], list[str]]]:
    """The peers, the engine first, and a sentence for each peer that could not start."""
    missing: list[str] = []
    with ExitStack() as stack:
        peers: list[Peer] = []
        for kind in ("engine", *arguments.peers):
            extra = {
                "kind": kind,
                "engine_dtype": "bf16" if dtype == "bf16" else "auto",
                "torch_dtype": DTYPES[dtype],
            }
            worker = stack.enter_context(
                Worker(sys.executable, "decode_worker.py", {**settings, **extra})
            )
            peers.append(Peer(kind, worker, _asks(worker)))
            worker.pause()
        for mode in arguments.vllm_modes if arguments.vllm_python else []:
            try:
                server = VllmServer.start(
                    arguments.vllm_python, settings["model"], settings["adapter"],
                    dtype=DTYPES[dtype], compiled=mode == "compiled",
                    rows=settings["rows"], context=2 * arguments.tokens + 16,
                    threads=arguments.threads,
                )  # fmt: skip
            except WorkerFailed as error:
                missing.append(f"vLLM {mode} did not start: {last_line(error)}.")
                continue
            peers.append(_vllm_peer(f"vLLM {mode}", stack.enter_context(server), settings))
        if arguments.vllm_url:
            peers.append(_vllm_peer("vLLM", VllmServer(arguments.vllm_url), settings))
        yield peers, missing


def _asks(worker: Worker) -> Callable[[int, bool, int], float]:
    return lambda step, ragged, tokens: worker.ask(step=step, ragged=ragged, tokens=tokens)[
        "seconds"
    ]


def _vllm_peer(name: str, server: VllmServer, settings: dict[str, Any]) -> Peer:
    def run(step: int, ragged: bool, tokens: int) -> float:
        return server.sample(
            make_job(
                settings["vocabulary"], settings["prompts"], settings["group"], tokens, ragged, step
            )
        )

    server.versions = server.fetch_versions()
    server.pause()
    return Peer(name, server, run)


def measure(peers: list[Peer], tokens: int, repeats: int) -> list[str]:
    """Fill each peer's seconds. A peer that fails is removed; returns a sentence for each."""
    failed = []
    for ragged in (False, True):
        for step in range(repeats + 1):
            for peer in list(peers):
                try:
                    seconds = peer.turn(
                        step, ragged, tokens if step else min(tokens, _WARM_UP_TOKENS)
                    )
                except (WorkerFailed, OSError, RuntimeError) as error:
                    if peer.name == "engine":
                        raise
                    failed.append(f"{peer.name} failed: {last_line(error)}.")
                    peers.remove(peer)
                    continue
                if step:
                    peer.seconds[ragged].append(seconds)
    return failed


def rows(
    peers: list[Peer], settings: dict[str, Any], dtype: str, tokens: int
) -> Iterator[list[str]]:
    for ragged in (False, True):
        job = make_job(
            settings["vocabulary"], settings["prompts"], settings["group"], tokens, ragged, 1
        )
        lengths = f"{min(job.lengths)} to {max(job.lengths)}" if ragged else f"all {tokens}"
        ours = peers[0].best(ragged)
        for peer in peers:
            seconds = peer.seconds[ragged]
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            yield [
                dtype,
                lengths,
                f"{job.tokens:,}",
                peer.name,
                spread,
                f"{job.tokens / min(seconds):.0f}",
                f"{min(seconds) / ours:.2f}",
            ]


def main() -> None:
    arguments = parse_arguments()
    load = load_average()
    settings = settings_of(arguments) | {
        "rows": arguments.prompts * arguments.group,
        "page_size": arguments.page_size,
        "prefill_tokens": arguments.prefill_tokens,
    }
    lines: list[list[str]] = []
    notes: list[str] = []
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings["adapter"] = str(Path(arguments.adapter or folder).resolve())
        settings["vocabulary"] = make_adapter(settings, folder)
        for dtype in arguments.dtypes:
            with start_peers(arguments, settings, dtype) as (peers, missing):
                notes += missing + measure(peers, arguments.tokens, arguments.repeats)
                found += [peer.process.versions for peer in peers]
                lines += rows(peers, settings, dtype, arguments.tokens)
    head = [
        "dtype",
        "lengths",
        "tokens",
        "peer",
        "seconds (best to worst)",
        "tok/s",
        "time / engine's",
    ]
    name = Path(arguments.model).name
    shape = f"{arguments.prompts}x{arguments.group}x{arguments.tokens}"
    publish(
        f"decode-{name}-{shape}",
        f"Decoding, {name}, {arguments.prompts} prompts x {arguments.group} completions x"
        f" {arguments.tokens} tokens",
        [
            (
                f"LoRA r16 on every linear layer, {arguments.threads} threads, {settings['rows']}"
                f" rows decode together, best of {arguments.repeats} turns after a short one."
                f" {versions_line(*found)}."
            ),
            *notes,
            table(head, lines),
        ],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
