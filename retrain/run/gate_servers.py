"""Where several servers sample, which of them the parity gate's finding is about."""

from collections.abc import Callable

from retrain.run.gate_fits import GateSample

_BEGINS = "Parity gate: "


def told_of(sampled: GateSample, judge: Callable[[GateSample], str]) -> str:
    """Return the fault that `judge` finds in the completions, as a sentence; "" if there is none.
    Where some servers are without fault, it is about the others.
    """
    fault = judge(sampled)
    if not fault:
        return ""
    part, servers = only_faulty(sampled, lambda part: bool(judge(part)))
    if not servers:
        return fault
    return naming(judge(part), servers)


def only_faulty(
    sampled: GateSample, is_faulty: Callable[[GateSample], bool]
) -> tuple[GateSample, str]:
    """Return the completions of the first server that is at fault where others are not, and the
    names of all that are; all completions and "" where the servers are alike.
    """
    servers = sorted({*sampled.servers})
    if len(servers) < 2:
        return sampled, ""
    faulty = [server for server in servers if is_faulty(sampled.part(server))]
    if not 0 < len(faulty) < len(servers):
        return sampled, ""
    return sampled.part(faulty[0]), f"{' and '.join(faulty)} alone of {len(servers)} servers"


def naming(sentence: str, servers: str) -> str:
    """The gate's sentence with the servers that it is about."""
    return sentence.replace(_BEGINS, f"Parity gate, at {servers}: ", 1)
