"""Count faults of language in the manual and in the package's text: `python scripts/prose.py`
prints a table, `--show RULE` the places of one rule. `make docs-check` fails where a count exceeds
its budget.

A hit is a place to look at, not always a fault. Code blocks, equations, tables, headings and inline
code do not count.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Place = tuple[str, str]
"""A file and a sentence in it."""

_UNUSUAL = (
    r"\b(?:anew|mend(?:s|ed|ing)?|foretells?|nought|whoever|thereof|whereof|lest|in place of|of"
    r" yours|said to be|(?:is|are) said|st(?:ands?|ood) in|stands? beside|parts? (?:at|from)|beside"
    r"|gold (?:answer|repl)\w*|teaches|taught|told apart|for good)\b"
)
_PASSIVE = (
    r"\b(?:is|are|was|were|be|been|being)\s+(?:(?:\w+ly|not|never|then|also)\s+)?(?:\w{2,}e[dn]|made"
    r"|done|told|said|drawn|read|kept|held|found|given|taken|left|put|sent|lost|set|cut|paid|built)\b"
)


def _pattern(pattern: str, flags: int = 0) -> Callable[[str], bool]:
    found = re.compile(pattern, flags)
    return lambda sentence: found.search(sentence) is not None


def _long(sentence: str) -> bool:
    return len(sentence.split()) > 25 or len(re.findall(r"[;:] ", sentence)) > 1


RULES: dict[str, Callable[[str], bool]] = {
    "subject": _pattern(
        r"^(?:Of|That|Whether|Which|Whose|What(?! is)|Where|As|How (?:many|much|often|long)) "
    ),
    "noun": _pattern(
        r"\b(?:those|that|ones?|it) (?:of|whose)\b|\bthose (?:that|who)\b|\bthe ones?\b"
    ),
    "passive": _pattern(_PASSIVE),
    "length": _long,
    "possessive": _pattern(
        r"\b(?:is|are|was|be|and|or|than|as) (?:\w+ ){0,2}\w+(?:'s|s')(?=[.,;:)]|$)"
    ),
    "negation": _pattern(r"^(?:Nothing|None|Nobody|Neither|No [a-z-]+) "),
    "is no": _pattern(r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|limit)[a-z]+"),
    "word": _pattern(_UNUSUAL, re.IGNORECASE),
}
"""Rule -> True for a sentence that breaks it: it does not begin with its subject; a pronoun has no
noun; the passive; more than 25 words, or two of `;` and `:`; a possessive at the end; a negation as
the subject; "is no X"; a word that the field does not use.
"""
BUDGETS: dict[str, tuple[int, int]] = {
    "subject": (0, 4),
    "noun": (0, 5),
    "passive": (0, 83),
    "length": (0, 58),
    "possessive": (0, 1),
    "negation": (0, 14),
    "is no": (0, 0),
    "word": (0, 1),
}
"""The most hits of a rule in the manual and in the package. A budget only falls."""
_PAGES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of four words or more."""
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n- |\n\d+\. ", text):
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`\"(])", re.sub(r"\s+", " ", block)):
            if len(sentence.split()) >= 4:
                yield sentence.strip(" -*>#")


@cache
def manual() -> list[Place]:
    """Return the sentences of the pages."""
    found = []
    for page in [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in _PAGES)]:
        text = re.sub(r"(?s)```.*?```|\$\$.*?\$\$", "", page.read_text(encoding="utf-8"))
        prose = [line for line in text.splitlines() if not line.startswith(("|", "#", "!["))]
        name = str(page.relative_to(ROOT))
        found += [(name, sentence) for sentence in sentences("\n".join(prose))]
    return found


@cache
def package() -> list[Place]:
    """Return the sentences of docstrings, messages and comments."""
    found = []
    for path in sorted((ROOT / "retrain").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for line, text in _texts(source):
            place = f"{path.relative_to(ROOT)}:{line}"
            found += [(place, sentence) for sentence in sentences(text)]
    return found


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of several words, and of each comment."""
    tree = ast.parse(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in parts or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            str(value.value) if isinstance(value, ast.Constant) else "{}" for value in values
        )
        if re.search(r"[a-z]{3,} [a-z]{2,} ", text):
            yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.search(r"noqa|type:|---", token.string):
            yield token.start[0], token.string.lstrip("# ")


def places(rule: str) -> tuple[list[Place], list[Place]]:
    """Return the places in the manual and in the package that break a rule."""
    broken = RULES[rule]
    first, second = ([place for place in text() if broken(place[1])] for text in (manual, package))
    return first, second


def over_budget() -> Iterator[str]:
    """Yield a sentence for each count that exceeds its budget."""
    for rule, budgets in BUDGETS.items():
        for name, found, budget in zip(("manual", "package"), places(rule), budgets, strict=True):
            if len(found) > budget:
                yield (
                    f'the rule "{rule}" has {len(found)} hits in the {name}, the budget is {budget};'
                    f' see `python scripts/prose.py --show "{rule}"`.'
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", choices=RULES, help="print the places of this rule")
    shown = parser.parse_args().show
    if shown:
        for place, sentence in [one for found in places(shown) for one in found]:
            print(f"{place}  {sentence}")
        return
    sizes = [len(text()) for text in (manual, package)]
    print("| rule | manual | package |\n|---|---|---|")
    for rule in RULES:
        counts = [
            f"{len(found)} ({len(found) / size:.1%})"
            for found, size in zip(places(rule), sizes, strict=True)
        ]
        print(f"| {rule} | {' | '.join(counts)} |")


if __name__ == "__main__":
    main()
