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

from retrain.system import prepare_torch


def main() -> None:
    """Train the run and answer with its outcome."""
    prepare_torch()
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_campaign() -> None:
        """Kill this process when the campaign ends, so that the run's folder is free for a campaign
        that is resumed a moment later.
        """
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_campaign, daemon=True).start()
    from retrain.campaign.launch import perform
    from retrain.config import config_from_toml

    outcome = perform(
        config_from_toml(request["config"], Path(request["path"]) if request["path"] else None)
    )
    json.dump(asdict(outcome), answer)
    answer.close()


if __name__ == "__main__":
    main()
