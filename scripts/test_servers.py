"""`make test-servers`: real inference servers, each in an environment of its own under the cache folder, and the tests marked `servers`.

    python scripts/test_servers.py [arguments of pytest]

What is installed stays. An installation that fails or takes too long is one sentence with the end of its log, and exit code 3.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVERS = Path(os.environ.get("RETRAIN_CACHE") or Path.home() / ".cache" / "retrain").resolve() / "servers"
INSTALL_S = 1200
AT_ONCE = 2
"""Installations; each waits for the network and for the disk in turn."""


def install(setup: Path) -> str:
    """Run a setup script; returns "" or why there is no such server now."""
    name = setup.name.removesuffix("-setup.sh")
    log = SERVERS / f"{name}-setup.log"
    began = time.monotonic()
    with log.open("wb") as output:
        environment = {"PYTHON": sys.executable} | os.environ
        process = subprocess.Popen([setup, SERVERS / name], stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(INSTALL_S)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{name}: {SERVERS / name}, {time.monotonic() - began:.0f} s", flush=True)
    if code == 0:
        return ""
    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    what = f"did not end within {INSTALL_S} s" if code is None else f"ended with {code}"
    return f"{end}\nThe installation of {name} ({setup.relative_to(ROOT)}) {what}; the end of {log} stands above."


def main(arguments: list[str]) -> int:
    SERVERS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = [*filter(None, pool.map(install, sorted((ROOT / "scripts" / "servers").glob("*-setup.sh"))))]
    if failed:
        print("\n".join(failed), file=sys.stderr)
        return 3
    command = [sys.executable, "-m", "pytest", "-m", "servers", "tests/servers", "-rP", "--durations=20"]
    command += ["--numprocesses=2", "--dist=loadgroup", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"RETRAIN_SERVERS": str(SERVERS)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
