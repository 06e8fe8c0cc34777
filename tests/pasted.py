"""The blocks of a document, pasted into a shell in a checkout as `make run` left it.

bash runs them, so that loops, variables, globs and redirections are what they are. Its `retrain`
asks this process, which forks the command from the server of tests/commands.py; this module is the
program that it becomes there. What takes long ends at once: a training and a campaign open their
folder as real ones do, and are given the files of a run that has ended. Nothing asks the hub.
"""

import json
import os
import runpy
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_ENDED = "PASTED_ENDED"
"""Variable with the folder of the run that has ended."""
_SHELL = """
retrain() {
  exec 3<>"/dev/tcp/127.0.0.1/$PASTED_PORT"
  printf '%s\\0' "$(($# + 1))" "$PWD" "$@" >&3
  local code; IFS= read -r code <&3; cat <&3; exec 3>&-
  return "$code"
}
for name in python make pip python3.11 wandb vllm compute-sanitizer; do eval "$name() { :; }"; done  # scripts/docs_check.py reads these
set -eu
"""


class Paste:
    """A shell in a checkout, and what went wrong in it."""

    def __init__(self, checkout: Path, ended: Path) -> None:
        """`ended`: a run that has ended."""
        self.checkout = checkout
        self.problems: list[str] = []
        """Of each command that neither succeeded nor said what this machine lacks, its line and its
        last line of output."""
        self._environment = os.environ | {_ENDED: str(ended), "HOME": str(checkout / "home")}

    def shell(self, block: str) -> None:
        with _answering(self._retrain) as port:
            environment = self._environment | {"PASTED_PORT": str(port)}
            done = subprocess.run(
                ["bash", "-c", _SHELL + block],
                cwd=self.checkout,
                env=environment,
                capture_output=True,
                text=True,
                timeout=240,
            )
        if (done.returncode and not self.problems) or done.stderr:
            self.problems.append(f"{block}: exit code {done.returncode} {done.stderr}")

    def python(self, block: str) -> None:
        (self.checkout / "block.py").write_text(block, encoding="utf-8")
        self._forked("block", str(self.checkout), "block.py")

    def _retrain(self, folder: str, *arguments: str) -> tuple[int, str]:
        return self._forked("retrain", folder, *arguments)

    def _forked(self, what: str, folder: str, *arguments: str) -> tuple[int, str]:
        from tests import commands

        done = commands.run(
            [sys.executable, __file__, what, *arguments], cwd=Path(folder), env=self._environment
        )
        parted = arguments[:1] == ("diff",) and done.stdout.startswith("First difference: step ")
        if done.returncode not in (0, 3) and not parted:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            self.problems.append(f"{what} {' '.join(arguments)}: {said[-1]}")
        return 0 if parted else done.returncode % 3, done.stdout


@contextmanager
def _answering(answer: Any) -> Iterator[int]:
    """Serve the shell's questions: the number of words, then the words, each ended by a NUL. Yields
    the port.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            code, output = answer(*[self.word() for _ in range(int(self.word()))])
            self.wfile.write(f"{code}\n{output}".encode())

        def word(self) -> str:
            text = b""
            while (byte := self.rfile.read(1)) != b"\0":
                text += byte
            return text.decode()

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


# ---- in the forked process -----------------------------------------------------------------------


def _train(config: Any, *, overwrite: bool = False, **_: Any) -> None:
    from retrain.config import dump_toml
    from retrain.config.load import replaced
    from retrain.run.start import open_run

    with open_run(config, overwrite=overwrite) as opened:
        if opened.checkpoint is None:
            shutil.copytree(
                os.environ[_ENDED],
                opened.folder.path,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns(".lock*"),
            )
            ended = json.loads(opened.folder.summary.read_text("utf-8"))
            own = {"training.seed": ended["seed"], "logging.label": ended["condition"]}
            opened.folder.config.write_text(dump_toml(replaced(opened.config, own)), "utf-8")


def _run_campaign(config: Any, **_: Any) -> Any:
    from campaigns import problems, write_run

    from retrain.campaign.manifest import open_campaign
    from retrain.campaign.plan import check, plan_campaign
    from retrain.config import dump_toml

    checked = check(plan_campaign(config, Path("campaign")))
    with open_campaign(config, checked) as (plan, manifest):
        for run in plan.runs:
            right = [int(index < 60 + run.seed * len(run.condition) % 4) for index in range(100)]
            folder = write_run(
                plan.folder / manifest[run.name].dir,
                run.seed,
                [0.5] * plan.max_steps,
                problems(right),
                measured={"step_time_s": 1.0, "tokens_per_s": 8000.0, "num_datums": 8},
                logging={"label": run.condition},
            )
            (folder / "config.toml").write_text(dump_toml(run.config), encoding="utf-8")
        return manifest


def _become(what: str, *arguments: str) -> int:
    from huggingface_hub import constants

    import retrain.campaign
    import retrain.run.loop
    from retrain.cli.main import main

    if "--probe" in arguments:  # a step of it is measured
        os.environ |= {
            "RETRAIN_TRAINING_BATCH_SIZE": "2",
            "RETRAIN_TRAINING_GROUP_SIZE": "2",
            "RETRAIN_TRAINING_MAX_TOKENS": "8",
        }
    os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
    retrain.run.loop.train = _train  # type: ignore[assignment]
    retrain.campaign.run_campaign = _run_campaign  # type: ignore[assignment]
    if what == "retrain":
        return main(arguments)
    runpy.run_path(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(_become(*sys.argv[1:]))
