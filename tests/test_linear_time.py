"""Whatever a model writes is read in a time in proportion to its length: in the trainer's thread
nothing else could stop it.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from retrain.advantages.planning import RegexDetector
from retrain.environments.bridge import tool_calls
from retrain.records.redact import Redactor
from retrain.records.terminal import clean, one_line, visible, without_escapes
from retrain.rewards.answers import answers_match, extract_boxed
from retrain.rewards.equality import decide_by_strings
from retrain.rewards.normalize import normalize

_SHORT, _LONG = 10_000, 40_000
_REDACTOR = Redactor({"A_KEY": "sesame-open"})
_DETECTOR = RegexDetector()

READERS: dict[str, Callable[[str], object]] = {
    "box": extract_boxed,
    "match": lambda text: answers_match(text, "5", "hendrycks"),
    "math": lambda text: decide_by_strings(text, "4"),
    "reference": lambda text: decide_by_strings("4", text),
    "planning": lambda text: _DETECTOR.detect([text[i : i + 4] for i in range(0, len(text), 4)]),
    "line": one_line,
    "clean": clean,
    "visible": visible,
    "pieces": lambda text: without_escapes([text[i : i + 4] for i in range(0, len(text), 4)]),
    "secrets": _REDACTOR.text,
    "tools": tool_calls,
}
HOSTILE = (
    *"$0 \\{(!^a'=\n-\u0130\u2019\u202e\x9b\x9d",
    *("9!", "^{", "://", "eyJ-", "sk-", "?key", "&a", "%3A%2F%2F", "%3Fkey", "eyJaaaaaaaaaa."),
    *(r"\boxed", r"\boxed ", r"\fbox", r"\boxed{", r"\frac", r"\frac1", r"\sqrt2", r"\text{ "),
    *(r"\boxed{}", r"\fbox{\boxed{}}", r"\left", "{,}", "</think>", "\x1b[", "\x1b]", "\x1b[0"),
    *("<tool_call>{", '<tool_call>{"name": 1}', '<tool_call>{"name": "'),
    *("wait", "wait ", "let me check ", "what if - "),
)


def seconds(read: Callable[[str], object], text: str, times: int = 3) -> float:
    """Of processor time, the best of a few: other processes do not count."""
    best = float("inf")
    for _ in range(times):
        began = time.process_time()
        read(text)
        best = min(best, time.process_time() - began)
    return best


@pytest.mark.parametrize("name", READERS)
def test_four_times_the_text_takes_four_times_as_long(name: str) -> None:
    read = READERS[name]
    for fragment in HOSTILE:
        for before, after in (("", ""), ("$", "x"), (r"\boxed{1}", "}"), ("0", "x")):
            short, long = (
                before + fragment * (size // len(fragment)) + after for size in (_SHORT, _LONG)
            )
            if seconds(read, long, 1) > 0.01:  # below, it is no matter
                assert seconds(read, long) < 8 * seconds(read, short) + 0.01, (
                    fragment,
                    before,
                    after,
                )


@pytest.mark.parametrize(
    "text",
    [
        "$" * 1600 + "x",
        "0" * 10**6 + "x",
        r"\boxed" * 160_000,
        r"\fbox" * 200_000,
        r"\boxed{" * 150_000,
        " " * 10**6,
    ],
)
def test_a_million_hostile_characters_are_judged_at_once(text: str) -> None:
    assert (
        seconds(lambda answer: (decide_by_strings(answer, "4"), extract_boxed(answer)), text) < 5
    )  # quadratic time would be minutes


def test_the_longest_answer_that_math_compares_is_read_at_once() -> None:
    for fragment in (*HOSTILE, "{}"):
        text = rf"\text{{{fragment * (990 // len(fragment))}}}"
        assert seconds(normalize, text, 1) < 0.5, fragment


@pytest.mark.slow
@pytest.mark.faults("characters of model text, through every function that reads it")
def test_a_million_characters_raise_nothing(record_property: Any) -> None:
    """Pieces that hurt one reader or another, between characters of every plane."""
    rng = random.Random(0)
    alphabet = [*HOSTILE, *map(chr, rng.sample(range(0x110000), 200))]
    texts = ["".join(rng.choices(alphabet, k=2000))[:5000].ljust(5000, "}") for _ in range(200)]
    took = {name: sum(seconds(read, text, 1) for text in texts) for name, read in READERS.items()}
    slowest = max(took, key=lambda name: took[name])
    record_property("cases", sum(map(len, texts)))
    record_property("slowest", f"{slowest}, {took[slowest]:.1f} s of processor time")
    assert took[slowest] < 60
