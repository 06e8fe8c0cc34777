"""The worker process of one run, `python -m retrain.campaign.worker`, started by `launch`.

It reads the run's configuration as one line of JSON from standard input, which then stays open: end
of file means that the campaign has ended, and ends this process too. The outcome is written to
standard output as JSON. Everything that the run prints goes to standard error, which is the run's
log.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO

from retrain.system import prepare_torch


def main() -> None:
    """Train the run and answer with its outcome."""
    prepare_torch()
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_campaign() -> None:
        """Kill this process when the campaign ends, so that the run's folder is free for a campaign
        that is resumed a moment later. It reads below sys.stdin, whose lock an interpreter that
        ends would wait for and die.
        """
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_campaign, daemon=True).start()
    with pipe:
        answer(request["config"], request["path"], pipe)


def answer(config: str, path: str, pipe: IO[str]) -> None:
    """Train the run of a configuration in TOML, which came from a file at `path` ("" for none), and
    write its outcome.
    """
    from retrain.campaign.launch import perform
    from retrain.config import config_from_toml

    json.dump(asdict(perform(config_from_toml(config, Path(path) if path else None))), pipe)


if __name__ == "__main__":
    main()
