"""Test once per process, within seconds, if the Hugging Face hub answers.

Left alone, the hub's clients retry for a minute without a network. After a negative answer this
module switches them to their own offline mode. Everything later in the process then uses the local
cache or fails at once.
"""

import os
import sys
import threading
from functools import lru_cache

PATIENCE_S = 5.0
"""A resolver without a network can block for far longer than any HTTP timeout, so a thread asks."""


def is_offline() -> bool:
    """Return True if the process must not ask the hub; does not ask the hub itself."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def reachable() -> bool:
    """Return True if the hub answers anything at all. Otherwise the process stays offline until it
    ends.
    """
    return not why_unreachable()


@lru_cache(maxsize=1)
def why_unreachable() -> str:
    """Return the failed attempt as a clause of an error message; empty if the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    answers: list[bool] = []
    thread = threading.Thread(target=_ask, args=(constants.ENDPOINT, answers), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if any(answers):
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries not yet imported, and for child processes
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # its import copied the constant
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"the hub ({constants.ENDPOINT}) did not answer within {PATIENCE_S:g} s"


def _ask(endpoint: str, answers: list[bool]) -> None:
    import httpx

    try:
        # Any status counts: the question is the network, not the page.
        httpx.head(endpoint, timeout=PATIENCE_S)
        answers.append(True)
    except (httpx.HTTPError, OSError):
        answers.append(False)
