"""Keys that stand for another key, brought to their canonical place before validation."""

from typing import Any

from retrain.config.violations import RuleViolations, Violation

ALIASES: dict[str, str] = {
    "algorithm.entropy_mask_rho": "algorithm.surprisal_mask_rho",
    "logging.strategic_grams": "planning.strategic_grams",
}
"""Accepted keys beside the canonical ones; giving both is an error."""


def canonical_keys(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data` in which aliases have moved, and dr_grpo has brought its aggregation along.

    Raises RuleViolations where a key and its alias are both given.
    """
    data, both = moved_aliases(data)
    if both:
        raise RuleViolations([Violation((alias, ALIASES[alias]), _both_given(alias, ALIASES[alias])) for alias in both])
    _complete_dr_grpo(data)
    return data


def moved_aliases(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of `data` with aliases under their canonical key, and the aliases that stayed because both are given."""
    copy = {name: dict(section) if isinstance(section, dict) else section for name, section in data.items()}
    return copy, [alias for alias, canonical in ALIASES.items() if not _move(copy, alias, canonical)]


def _move(data: dict[str, Any], alias: str, canonical: str) -> bool:
    """False when both are given."""
    section, _, name = alias.partition(".")
    if not isinstance(data.get(section), dict) or name not in data[section]:
        return True
    target, _, target_name = canonical.partition(".")
    if not isinstance(data.setdefault(target, {}), dict) or target_name in data[target]:
        return False
    data[target][target_name] = data[section].pop(name)
    return True


def _both_given(alias: str, canonical: str) -> str:
    return f"{bracketed(alias)} is another name of {bracketed(canonical)} and both are given; keep the second"


def _complete_dr_grpo(data: dict[str, Any]) -> None:
    """dr_grpo is GRPO's advantage with constant aggregation, so an aggregation that was not given follows from it."""
    algorithm = data.get("algorithm")
    loss = data.get("loss", {})
    if isinstance(algorithm, dict) and algorithm.get("algorithm_mode") == "dr_grpo" and isinstance(loss, dict):
        data["loss"] = {"aggregation": "constant", **loss}


def bracketed(path: str) -> str:
    """ "section.key" as a user sees it in a file: [section] key."""
    section, _, name = path.partition(".")
    return f"[{section}] {name}"
