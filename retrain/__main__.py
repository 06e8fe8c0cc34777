"""`python -m retrain` is `retrain`."""

import sys

if not sys.flags.safe_path:
    # Remove the current folder, whose random.py would replace Python's; plugins still load from it.
    del sys.path[0]

from retrain.cli import start

sys.exit(start())
