"""The parity gate looks more than once, each time with other noise: a server is at fault if it
fails every look that it answered.

Each server is judged by its own completions alone: among those of all servers, a fault of one would
be a small share.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from retrain.errors import RunFailed
from retrain.run.gate_fits import Suspect

Findings = Mapping[str, Sequence[Suspect]]
"""Address of a server, or "" -> what is wrong with it."""
Seen = TypeVar("Seen")


def fault(sentence: str) -> list[Suspect]:
    """The sentence as the only finding, with no known cause; no finding for "", a sound server."""
    return [Suspect(0.0, sentence)] if sentence else []


def first_sound(looks: Iterable[tuple[Seen, Findings]]) -> Seen:
    """Take looks until each server of the newest was sound in it or in an earlier one, and return
    what the newest saw. Raises RunFailed if the looks end before.
    """
    before = list[Findings]()
    for seen, findings in looks:
        before.append(findings)
        wrong = [
            server
            for server in findings
            if all(any(one.stops for one in look[server]) for look in before if server in look)
        ]
        if not wrong:
            return seen
    found = list(chain.from_iterable(look.get(wrong[0], ()) for look in reversed(before)))
    # A cause says more than a fault, whose cause may be a group too small to stop a run by itself.
    causes = [one for one in found if one.explained]
    told = [one for one in causes if one.stops] or causes or [one for one in found if one.stops]
    raise RunFailed(naming(max(told, key=lambda one: one.explained).sentence, wrong, len(findings)))


def naming(sentence: str, servers: Sequence[str], count: int) -> str:
    """The gate's sentence with the servers that it is about, unless those are all."""
    if len(servers) == count:
        return sentence
    where = f"Parity gate, at {' and '.join(servers)} alone of {count} servers: "
    return sentence.replace("Parity gate: ", where, 1)
