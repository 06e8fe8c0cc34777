"""How torch's threads wait for each other, where a run computes with threads and not with worker processes (`retrain/model/pool.py`).

GNU OpenMP spins for milliseconds at every barrier. With another process on the same cores (a reward worker, a second run) the
spinning threads take the time that the working one needs: a step then takes several times longer. A short spin costs little on a quiet
machine and keeps most of that time.
"""

import os

_SPINS = "20000"


def spin_briefly() -> None:
    """Must run before torch is imported, which reads the variables. What the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
