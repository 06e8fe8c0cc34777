"""The parity gate looks more than once, each time with other noise: a server is at fault if it
fails every look that it answered.

Each server is judged by its own completions alone: among those of all servers, a fault of one would
be a small share.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from retrain.errors import RunFailed

Findings = Mapping[str, str]
"""Address of a server, or "" -> the gate's sentence of what is wrong with it; "" if nothing is."""
Seen = TypeVar("Seen")


def first_sound(looks: Iterable[tuple[Seen, Findings]]) -> Seen:
    """Take looks until each server of the newest was sound in it or in an earlier one, and return
    what the newest saw. Raises RunFailed if the looks end before.
    """
    before = list[Findings]()
    for seen, findings in looks:
        before.append(findings)
        wrong = [
            server for server in findings if all(look[server] for look in before if server in look)
        ]
        if not wrong:
            return seen
    told = next(look[wrong[0]] for look in reversed(before) if wrong[0] in look)
    if len(wrong) < len(findings):
        where = f"Parity gate, at {' and '.join(wrong)} alone of {len(findings)} servers: "
        told = told.replace("Parity gate: ", where, 1)
    raise RunFailed(told)
