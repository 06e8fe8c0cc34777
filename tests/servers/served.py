"""Real servers for tests, each started by the command that `retrain serve` prints.

RETRAIN_SERVERS names the folder of their environments (default: .servers), which `make test-servers` makes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("RETRAIN_SERVERS", ROOT / ".servers")).resolve()
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def python_of(server: str) -> Path:
    """The interpreter of a server's environment, which must be there."""
    found = HOME / server / "bin" / "python"
    assert found.exists(), f"{found} is missing: scripts/servers/{server}-setup.sh {HOME / server}"
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def printed_command(engine: str, config: Path, *flags: str) -> str:
    arguments = ["serve", engine, str(config), "--python", str(python_of(engine)), *flags]
    return subprocess.run([sys.executable, "-m", "retrain", *arguments], capture_output=True, text=True, check=True).stdout


@contextmanager
def running(command: str, url: str, log: Path, seconds: float = 300) -> Iterator[None]:
    """The server of a shell command while it answers at `url`; it ends with the block."""
    with log.open("wb") as out:
        server = subprocess.Popen(["bash", "-c", command], stdout=out, stderr=out, env=ENVIRONMENT, start_new_session=True)
    try:
        wait_until_healthy(server, url, log, seconds)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert server.poll() is None, f"the server ended with {server.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not healthy after {seconds:.0f} s:\n{log.read_text(errors='replace')[-3000:]}")
