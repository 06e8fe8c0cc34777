"""Run the worker process of one run, `python -m retrain.campaign.worker`, which `launch` starts.

It reads the run's configuration as one line of JSON from standard input, which then stays open. End
of file means that the campaign has ended, and ends this process too. It writes the outcome to
standard output as JSON. Everything that the run prints goes to standard error, which is the run's
log.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from retrain.system import prepare_torch

INTERRUPTED = {"status": "interrupted", "reason": "Interrupted by SIGINT."}
"""The outcome of a run that got the signal before it had handlers."""


def main() -> None:
    """Train the run and answer with its outcome."""
    prepare_torch()
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_campaign() -> None:
        """Kill this process when the campaign ends, so that the run's folder is free for a campaign
        that resumes a moment later. It reads below sys.stdin: an interpreter that ends would wait
        for the lock of sys.stdin and die.
        """
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_campaign, daemon=True).start()
    with pipe:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # `launch` let it wait
            answer(request, pipe)
        except KeyboardInterrupt:
            json.dump(INTERRUPTED, pipe)


def answer(request: Mapping[str, str], pipe: IO[str]) -> None:
    """Train the run of a request and write its outcome: `config` in TOML, which came from the file
    `path` ("" for none).
    """
    from retrain.campaign.launch import MAX_REASON, perform
    from retrain.config import config_from_toml

    path = request["path"]
    config = config_from_toml(request["config"], Path(path) if path else None)
    outcome = perform(config)
    json.dump(asdict(replace(outcome, reason=outcome.reason[:MAX_REASON])), pipe)


if __name__ == "__main__":
    main()
