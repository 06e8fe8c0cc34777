r"""The final answer of a completion: the content of its last `\boxed{...}` or `\fbox{...}`.

The last marker decides, even if it is broken: a completion that was cut inside its box has given no answer.
"""

import re
from collections import deque

_MARKER = re.compile(
    r"""
    \\(?:boxed|fbox)\s*+(?P<brace>\{)       # \boxed{...}, \fbox {...}
    | \\boxed\ (?=[^\S\n]*+[^\s$])           # Hendrycks' second form: \boxed 5, up to the next $ or the end of the line
    """,
    re.VERBOSE,
)
_BARE = re.compile(r"[^$\n]*+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escape, which is skipped: an escaped brace, a line break, the first letter of a command."""
LONGEST_ANSWER = 1 << 16
"""Most characters of a box; a longer one counts as broken and is not read to its end."""
_END_OF_THOUGHT = "</think>"


def extract_boxed(text: str, after_think: bool = True) -> str | None:
    r"""Return the stripped content of the last box: "" for an empty box, None without a box or with unbalanced braces.

    `\{` and `\}` are characters, not braces. With `after_think` only what follows the last `</think>` counts, if there is one.
    """
    if after_think:
        text = after_thought(text)
    markers = deque(_MARKER.finditer(text), maxlen=1)
    if not markers:
        return None
    last = markers[0]
    start, limit = last.end(), last.end() + LONGEST_ANSWER
    if last["brace"]:
        end = closing_brace(text[:limit], start)
        return None if end is None else text[start:end].strip()
    bare = _BARE.match(text, start, limit)
    return bare.group().strip() if bare else None


def after_thought(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is none."""
    return text.rpartition(_END_OF_THOUGHT)[2]


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the group whose content starts at `start`; None if the text ends first."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None
