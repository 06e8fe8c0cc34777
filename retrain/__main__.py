"""`python -m retrain` is `retrain`."""

import sys

from retrain.cli.main import main

sys.exit(main())
