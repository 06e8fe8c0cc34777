"""The test packages are importable without being installed, those of the generation that the
installed verifiers has.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    GENERATION = "v0" if version("verifiers").startswith(("0.1.", "0.2.", "0.3.")) else "v1"
except PackageNotFoundError:
    GENERATION = "v1"
sys.path.insert(0, str(Path(__file__).parent / "packages" / GENERATION))
