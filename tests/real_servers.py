"""Real servers for the tests marked `servers`: started by scripts/servers/<name>-start.sh from what
<name>-setup.sh installed.

`make test-servers` installs them and sets RETRAIN_SERVERS to the folder that holds an environment
for each. A server that is missing or does not start fails the test.
"""

import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "retrain" / "assets" / "lab"
_START_S = 600
"""vLLM takes 30 s on two quiet cores, and more than 200 s on two that are shared by many. The first
start of MAX compiles the model: 4 minutes for 135M parameters."""
_HEALTH = {"tinker": "/api/v1/healthz"}
_FLAGS = {"vllm": ("--distributed-executor-backend", "uni")}
"""vLLM's worker in the process of its engine: a third less to import at each start."""
_SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class RealServer:
    """A server process that leads a session of its own, so that its workers end with it; it ends
    when the tests do, however they end.
    """

    model = LAB

    def __init__(
        self, name: str, log: Path, model: Path = LAB, flags: tuple[str, ...] = ()
    ) -> None:
        self.place(name, log)
        self.model = model
        environment, script = (
            Path(os.environ["RETRAIN_SERVERS"]) / name,
            ROOT / "scripts" / "servers" / f"{name}-start.sh",
        )
        self.start(
            [*map(str, (script, environment, model, self.port)), *_FLAGS.get(name, ()), *flags]
        )

    def place(self, name: str, log: Path) -> None:
        self.name, self.log, self.port = name, log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, command: list[str]) -> None:
        self.command = command
        guarded = [sys.executable, str(ROOT / "tests" / "guard.py"), str(os.getpid()), *command]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                guarded,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_SETTINGS | os.environ,
            )

    def wait(self) -> None:
        """Until it is healthy."""
        end, health = time.monotonic() + _START_S, self.url + _HEALTH.get(self.name, "/health")
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(health, timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        found = (
            f"was not healthy within {_START_S} s"
            if self.process.poll() is None
            else f"ended with {self.process.poll()}"
        )
        raise AssertionError(
            f"the {self.name} server {found}; its last"
            f" lines:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Printed(RealServer):
    """Started by what `retrain serve` prints for a model at rank 12 and 64 new tokens."""

    def __init__(self, engine: str, folder: Path, model: str = "lab") -> None:
        self.place(engine, folder / "server.log")
        config = folder / "lab.toml"
        inference = f'[inference]\nengine = "{engine}"\nurl = "{self.url}"\n'
        config.write_text(
            f'{inference}[model]\nmodel = "{model}"\nlora_rank = 12\n[training]\nmax_tokens ='
            ' 64\n[data]\nsource = "lab"\n'
        )
        python = Path(os.environ["RETRAIN_SERVERS"]) / engine / "bin" / "python"
        arguments = [
            sys.executable,
            "-m",
            "retrain",
            "serve",
            engine,
            str(config),
            "--python",
            str(python),
        ]
        self.printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        self.start(["bash", "-c", self.printed])


@contextmanager
def ended(server: RealServer) -> Iterator[RealServer]:
    """Healthy inside, and gone after it."""
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@contextmanager
def started(name: str, *variants: tuple[Path, tuple[str, ...]]) -> Iterator[list[RealServer]]:
    """Servers of (model, further flags), started together; LAB without flags where no variant is
    given.
    """
    with TemporaryDirectory() as folder, ExitStack() as undo:
        found = []
        for number, (model, flags) in enumerate(variants or [(LAB, ())]):
            found.append(RealServer(name, Path(folder) / f"{number}.log", model, flags))
            undo.callback(found[-1].kill)
        for server in found:
            server.wait()
        yield found


def free_port(neighbors: int = 1) -> int:
    """Return the first of so many neighboring free ports, below those that a system gives to
    connections: a server that loads for a minute finds its port still free.
    """
    while True:
        first = random.randrange(15_000, 32_000)
        with ExitStack() as bound, suppress(OSError):
            for port in range(first, first + neighbors):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def await_steps(folder: Path, steps: int) -> None:
    """Until a run in another thread has taken so many steps."""
    for _ in range(12_000):
        with suppress(FileNotFoundError):
            if (folder / "metrics.jsonl").read_bytes().count(b"\n") >= steps:
                return
        time.sleep(0.02)


def largest_difference(record: Any) -> float:
    """Nats, from the largest and the smallest ratio of the step, which are at temperature 1."""
    return max(abs(math.log(record.ratio_max or 1)), abs(math.log(record.ratio_min or 1)))
