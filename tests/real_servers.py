"""Real servers for the tests marked `servers`: started by scripts/servers/<name>-start.sh from what <name>-setup.sh installed.

`make test-servers` installs them and sets RETRAIN_SERVERS to the folder that holds an environment for each. A server that is missing or
does not start fails the test.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "retrain" / "assets" / "lab"
_START_S = 600
"""vLLM takes 30 s on two quiet cores, and more than 200 s on two that are shared by many."""


class RealServer:
    """A server process in a session of its own, so that its workers end with it."""

    def __init__(self, name: str, log: Path, model: Path = LAB, flags: tuple[str, ...] = (), port: int = 0) -> None:
        environment = Path(os.environ["RETRAIN_SERVERS"]) / name
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [str(ROOT / "scripts" / "servers" / f"{name}-start.sh"), str(environment), str(model), str(self.port), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self, path: str = "/health") -> "RealServer":
        """Until it is healthy."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + path, timeout=5, trust_env=False).status_code == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"{self.process.args} is not healthy; its last lines:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def started(name: str, *variants: tuple[Path, tuple[str, ...]]) -> Iterator[list[RealServer]]:
    """Servers of (model, further flags), started together; LAB without flags where no variant is given."""
    with TemporaryDirectory() as folder:
        servers = [
            RealServer(name, Path(folder) / f"{number}.log", model, flags) for number, (model, flags) in enumerate(variants or [(LAB, ())])
        ]
        try:
            yield [server.wait() for server in servers]
        finally:
            for server in servers:
                server.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
