"""`make test-servers`: real inference servers, each in an environment of its own under the cache
folder, and the tests marked `servers`.

    python scripts/test_servers.py [arguments of pytest]

What is installed stays. An installation that fails or takes too long is one sentence with the end
of its log, and exit code 3.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVERS = (
    Path(os.environ.get("RETRAIN_CACHE") or Path.home() / ".cache" / "retrain").resolve()
    / "servers"
)
INSTALL_S = 1200
AT_ONCE = 2
"""Installations; each waits for the network and for the disk in turn."""
ALSO = "tinker-client.sh"
"""Installed too; the tests of Tinker run it again for the newest package."""
BESIDE = {"test_tinker.py"}
"""Files that run while the others do, for about as long. Not by pytest-xdist: its groups have no
effect under pytest 9.2."""
NOTHING_SELECTED = 5
"""pytest's exit code, for instance for a -k that means the other group."""


def install(setup: Path) -> str:
    """Run a setup script; returns "" or why there is no such server now."""
    name = setup.stem.removesuffix("-setup")
    log = SERVERS / f"{name}-setup.log"
    began = time.monotonic()
    with log.open("wb") as output:
        environment = {"PYTHON": sys.executable} | os.environ
        process = subprocess.Popen(
            [setup, SERVERS / name],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
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
    return (
        f"{end}\nThe installation of {name} ({setup.relative_to(ROOT)}) {what}; the end of {log}"
        " stands above."
    )


def main(arguments: list[str]) -> int:
    SERVERS.mkdir(parents=True, exist_ok=True)
    scripts = ROOT / "scripts" / "servers"
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = [
            *filter(None, pool.map(install, [*sorted(scripts.glob("*-setup.sh")), scripts / ALSO]))
        ]
    if failed:
        print("\n".join(failed), file=sys.stderr)
        return 3
    return max(tested(arguments))


def tested(arguments: list[str]) -> list[int]:
    """Exit codes of the two groups of files; the output of the second follows that of the first."""
    files = {path.name for path in (ROOT / "tests" / "servers").glob("test_*.py")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "servers",
        "-rP",
        "--durations=20",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = os.environ | {"RETRAIN_SERVERS": str(SERVERS)}
    with tempfile.TemporaryFile() as later:
        running = []
        for names, output in ((files - BESIDE, None), (BESIDE, later)):
            paths = [f"tests/servers/{name}" for name in sorted(names)]
            running.append(
                subprocess.Popen([*command, *paths], cwd=ROOT, env=environment, stdout=output)
            )
        codes = [process.wait() for process in running]
        later.seek(0)
        print(later.read().decode(errors="replace"), flush=True)
    return [0 if code == NOTHING_SELECTED and len({*codes}) > 1 else code for code in codes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
