"""How torch's threads wait for each other.

GNU OpenMP spins for milliseconds at every barrier. With another process on the same cores (a reward worker, a second run) the
spinning threads take the time that the working one needs: sampling the lab with 2 threads beside one busy process took 7 to 40 s
instead of 1.4 s. A short spin costs nothing on a quiet machine (1.55 s) and 2.2 s beside that process (python benchmarks/threads.py).
"""

import os

_SPINS = "20000"


def spin_briefly() -> None:
    """Must run before torch is imported, which reads the variables. What the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
