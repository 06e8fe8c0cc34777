"""The built-in names of everything that a plugin can also be, and the form of a plugin's name.

A value is accepted when it is built in, registered from Python, an installed entry point, or has the form of a dotted
path. Nothing is imported here: a dotted path that leads nowhere is found when the run starts.
"""

import re
from importlib.metadata import entry_points

BUILTIN_NAMES: dict[str, tuple[str, ...]] = {
    "advantage": ("grpo", "maxrl", "rloo", "grpo_std", "reinforce", "reinforce_pp"),
    "transform": ("none", "gtpo", "hicra", "gtpo_hicra", "gtpo_sepa", "gtpo_sepa_amp", "gtpo_sepa_amp_c", "entropy_mask"),
    "uncertainty": ("surprisal", "predictive_variance", "shannon_entropy"),
    "algorithm": ("grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa", "dr_grpo"),
    "reward": ("match", "math", "judge", "custom", "random"),
    "data": ("math", "gsm8k", "lab", "jsonl", "parquet"),
    "engine": ("pytorch", "max", "vllm", "sglang", "mlx", "openai"),
    "backend": ("local", "tinker", "prime_rl"),
}

UNCERTAINTY_ALIASES: dict[str, str] = {
    "token_surprisal": "surprisal",
    "neg_logprob": "surprisal",
    "negative_logprob": "surprisal",
    "nll": "surprisal",
    "entropy": "shannon_entropy",
    "shannon": "shannon_entropy",
    "token_entropy": "shannon_entropy",
    "pred_var": "predictive_variance",
    "bernoulli_variance": "predictive_variance",
}

RECIPES: dict[str, tuple[str, str]] = {
    "grpo_none": ("grpo", "none"),
    "maxrl_none": ("maxrl", "none"),
    "maxrl_gtpo": ("maxrl", "gtpo"),
    "maxrl_gtpo_hicra": ("maxrl", "gtpo_hicra"),
    "maxrl_gtpo_sepa": ("maxrl", "gtpo_sepa"),
    "dr_grpo": ("grpo", "none"),
}
"""The advantage and the transform that a built-in `algorithm_mode` stands for; `dr_grpo` also fixes `[loss] aggregation`."""

GROUP_RELATIVE_ADVANTAGES = frozenset({"grpo", "maxrl", "rloo", "grpo_std", "reinforce_pp"})
"""Advantages that are zero for every group of one completion."""

PLANNING_TRANSFORMS = frozenset({"hicra", "gtpo_hicra", "gtpo_sepa", "gtpo_sepa_amp", "gtpo_sepa_amp_c"})
SEPA_TRANSFORMS = frozenset({"gtpo_sepa", "gtpo_sepa_amp", "gtpo_sepa_amp_c"})
GTPO_TRANSFORMS = frozenset({"gtpo", "gtpo_hicra", "entropy_mask"}) | SEPA_TRANSFORMS
HICRA_TRANSFORMS = frozenset({"hicra", "gtpo_hicra"})

DATA_FILE_SUFFIXES = (".jsonl", ".parquet")
PLUGIN_GROUP = "retrain.plugins"

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_registered: dict[str, set[str]] = {}


def register_name(kind: str, name: str) -> None:
    """Make the configuration accept `name` for `kind`, for parts that Python code registers while it runs."""
    _registered.setdefault(kind, set()).add(name)


def is_dotted(name: str) -> bool:
    """Whether `name` has the form of a plugin's path, such as my_module.my_advantage."""
    return _DOTTED.fullmatch(name) is not None


def is_known(kind: str, name: str) -> bool:
    """Whether the schema accepts `name`; entry points are looked up last, since reading them costs milliseconds."""
    if name in BUILTIN_NAMES[kind] or name in _registered.get(kind, ()):
        return True
    if kind == "data" and is_data_location(name):
        return True
    return is_dotted(name) or any(point.name == name for point in entry_points(group=PLUGIN_GROUP))


def is_data_location(source: str) -> bool:
    """A hub data set (hub:NAME), or a file or folder rather than a name."""
    if source.startswith("hub:"):
        return len(source) > len("hub:")
    return "/" in source or source.endswith(DATA_FILE_SUFFIXES)


def names_of(kind: str) -> tuple[str, ...]:
    return BUILTIN_NAMES[kind] + tuple(sorted(_registered.get(kind, ())))


def last_part(name: str) -> str:
    return name.rpartition(".")[2] if is_dotted(name) else name


def condition_label(advantage_mode: str, transform_mode: str, algorithm_mode: str = "") -> str:
    """The name of a condition: `{advantage}+{transform}`, the last part of dotted paths, or the algorithm."""
    if algorithm_mode:
        return last_part(algorithm_mode)
    return f"{last_part(advantage_mode)}+{last_part(transform_mode)}"
