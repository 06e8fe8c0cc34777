"""Removed keys, flags and commands: the rows of removed.toml, and the sentence that answers each of
them.
"""

import tomllib
from functools import cache
from pathlib import Path

from retrain.config.names import by_path, copied
from retrain.system import Json

REDEFINED = "dr_grpo is the paper's recipe; what 0.9 called so is grpo_constant today."
"""The note on every configuration with this algorithm_mode, old or new."""


@cache
def removed() -> dict[str, Json]:
    """Map each name of removed.toml to its row."""
    text = Path(__file__).with_name("removed.toml").read_text(encoding="utf-8")
    return {row["name"]: row for row in tomllib.loads(text)["removed"]}


def farewell(name: str, given: str = "") -> str:
    """Say that a name left and what to write instead; "" for a name that did not leave.

    `given` is the name as the user wrote it.
    """
    row = removed().get(name)
    if row is None:
        return ""
    return f"{given or name} left in 0.10; {row['instead']}"


def removed_key(word: str) -> str:
    """Return the removed "section.key" that a flag or a variable named, "" for any other word.

    `word` stands without its dashes or RETRAIN_ in front.
    """
    from retrain.config.keys import flag_of

    spelled = word.lower().replace(".", "_").replace("-", "_").removeprefix("no_")
    for path in removed():
        section, dot, name = path.partition(".")
        flag = flag_of(section, name).removeprefix("--").replace("-", "_")
        if dot and spelled in (f"{section}_{name}", flag):
            return path
    return ""


def without_removed(data: Json, *, all_of_them: bool) -> Json:
    """Drop the removed keys that have the value of a stored default. With `all_of_them`, drop them
    whatever their value, and also the keys that have a removed value.
    """
    kept = copied(data)
    for written, row in removed().items():
        path, is_value, value = written.partition(" = ")
        section, _, name = path.partition(".")
        keys = kept.get(section)
        if not isinstance(keys, dict) or name not in keys:
            continue
        leaves = all_of_them and (not is_value or keys[name] == value)
        if leaves or keys[name] == row.get("stored"):
            del keys[name]
    # In 0.9 `dr_grpo` was today's `grpo_constant`. A run's file has every key, and of the two the
    # recipe alone sets the aggregation.
    given = by_path(kept)
    complete = {"algorithm.surprisal_mask_denominator", "loss.log_ratio_clamp"} <= given.keys()
    if (
        complete
        and given.get("algorithm.algorithm_mode") == "dr_grpo"
        and "loss.aggregation" not in given
    ):
        kept["algorithm"]["algorithm_mode"] = "grpo_constant"
    return kept
