"""Runs a real server that ends when the tests end: `python tests/guard.py PARENT COMMAND...`.

The guard leads a session of its own, so Ctrl-C does not reach the server, and it ends the whole
session: servers have children too.
"""

import os
import signal
import subprocess
import sys
import time
from threading import Event

_LOOK_S = 0.2
_GRACE_S = 10.0


def main() -> int:
    """Run the server, and return its exit code if it ends by itself; it is killed with its children
    where they do not end in time.
    """
    parent, *command = sys.argv[1:]
    asked_to_stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())
    server = subprocess.Popen(command)
    while server.poll() is None and os.getppid() == int(parent) and not asked_to_stop.is_set():
        time.sleep(_LOOK_S)
    if server.poll() is None:
        os.killpg(0, signal.SIGTERM)  # this process too, which goes on
        try:
            server.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(0, signal.SIGKILL)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main())
