r"""Finding the final answer of a completion: the content of its last `\boxed{...}` or `\fbox{...}`.

The last marker by position decides, even when it is broken: a completion cut inside its box has given no answer.
"""

import re

_MARKER = re.compile(
    r"""
    \\(?:boxed|fbox)\s*(?P<braced>\{)        # \boxed{...}, \fbox {...}
    | \\boxed\ (?P<bare>[^$\n]*[^\s$][^$\n]*)  # Hendrycks' second form: \boxed 5, up to the next $ or the end of the line
    """,
    re.VERBOSE,
)
_END_OF_THOUGHT = "</think>"


def extract_boxed(text: str, after_think: bool = True) -> str | None:
    r"""The stripped content of the last box, "" for an empty box, None without a box or with unbalanced braces.

    `\{` and `\}` are characters, not braces. With `after_think` only what follows the last `</think>` counts, if there is one.
    """
    if after_think:
        text = text.rpartition(_END_OF_THOUGHT)[2]
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    while start >= 0:
        marker = _MARKER.match(text, start)
        if marker is not None:
            return _content(text, marker)
        start = max(text.rfind(r"\boxed", 0, start), text.rfind(r"\fbox", 0, start))
    return None


def _content(text: str, marker: "re.Match[str]") -> str | None:
    if marker["braced"] is None:
        return marker["bare"].strip()
    start = marker.end()
    end = closing_brace(text, start)
    return None if end is None else text[start:end].strip()


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the group whose content starts at `start`; None if the text ends first."""
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2  # an escaped brace, a line break, or the first letter of a command
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
