"""A vLLM server as a peer of decode.py: started from its own environment, or already running at a
given address.
"""

import json
import os
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from processes import ProcessGroup, WorkerFailed
from workers.job import Job

ADAPTER = "policy"
_START_S = 900  # compiling takes minutes
_KV_GIB = 4


class VllmServer:
    """`sample` requests a job as a trainer would: token ids in, token ids with log-probs of the
    sampled distribution out.
    """

    def __init__(self, url: str, group: ProcessGroup | None = None) -> None:
        self.url, self.group = url.rstrip("/"), group
        self.versions: dict[str, str] = {}

    @classmethod
    def start(
        cls, python: str, model: str, adapter: str, *, dtype: str, compiled: bool, rows: int,
        context: int, threads: int,
        seconds: float = _START_S,
    ) -> Self:  # fmt: skip
        """Start a server that decodes `rows` sequences together; on a CPU it binds one thread to
        each of the first `threads` cores.

        Raises WorkerFailed if it is not ready after `seconds`.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processors = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--served-model-name", "base",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len",
            str(context), "--max-num-seqs", str(rows),
            "--enable-lora", "--max-lora-rank", "16", "--max-loras", "1", "--lora-modules",
            f"{ADAPTER}={adapter}",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            *([] if compiled else ["--enforce-eager"]),
        ]  # fmt: skip
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": processors,
        }
        group = ProcessGroup(command, environment)
        server = cls(f"http://127.0.0.1:{port}", group)
        try:
            server._wait(seconds)
        except BaseException:
            group.close()
            raise
        return server

    def _wait(self, seconds: float) -> None:
        assert self.group is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.group.process.poll() is not None:
                raise WorkerFailed(f"vLLM ended before it was ready:\n{self.group.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise WorkerFailed(f"vLLM was not ready after {seconds:.0f} s:\n{self.group.log_tail()}")

    def fetch_versions(self) -> dict[str, str]:
        with urllib.request.urlopen(f"{self.url}/version", timeout=10) as answer:
            return {"vllm": json.load(answer)["version"]}

    def sample(self, job: Job) -> float:
        """Seconds until all completions have arrived. All requests are sent at once: one per group
        if lengths are equal, else per row.
        """
        if job.uniform:
            asked = [(prompt.tolist(), job.group, job.lengths[0]) for prompt in job.prompts]
        else:
            asked = [
                (job.prompts[row // job.group].tolist(), 1, length)
                for row, length in enumerate(job.lengths)
            ]
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(len(asked)))
            start = time.perf_counter()
            made = sum(pool.map(self._complete, asked))
            seconds = time.perf_counter() - start
        if made != job.tokens:
            raise RuntimeError(f"vLLM made {made} tokens instead of {job.tokens}")
        return seconds

    def _complete(self, asked: tuple[list[int], int, int]) -> int:
        prompt, count, length = asked
        body: dict[str, Any] = {
            "model": ADAPTER,
            "prompt": prompt,
            "n": count,
            "max_tokens": length,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return sum(len(choice["token_ids"]) for choice in json.load(answer)["choices"])

    def pause(self) -> None:
        if self.group is not None:
            self.group.pause()

    def resume(self) -> None:
        if self.group is not None:
            self.group.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.group is not None:
            self.group.close()
