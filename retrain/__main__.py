"""`python -m retrain` is `retrain`."""

import sys

if not sys.flags.safe_path:
    # The current folder, whose random.py would replace Python's; plugins are found there anyway.
    del sys.path[0]

from retrain.cli.main import main

sys.exit(main())
