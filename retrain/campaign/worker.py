"""A run of a campaign in a process of its own: `python -m retrain.campaign.worker`, started by `subprocesses`.

Standard input brings the run's configuration in one line of JSON and then stays open: when it ends, the campaign is gone, and so is
this process. Standard output takes the outcome back, one line of JSON; what the run prints goes to its log, which is standard error.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO

from retrain.processes import spin_briefly


def main() -> None:
    spin_briefly()
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_the_campaign, args=(sys.stdin.buffer,), daemon=True).start()
    from retrain.campaign.launch import perform
    from retrain.config import config_from_toml

    outcome = perform(config_from_toml(request["config"], Path(request["path"]) if request["path"] else None))
    json.dump(asdict(outcome), answer)
    answer.close()


def _die_with_the_campaign(pipe: IO[bytes]) -> None:
    """At once, so that a campaign that is taken up again a moment later finds the run's folder free."""
    pipe.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
