"""A wrong plugin of each kind, and the sentence that it gets before step 0."""

from pathlib import Path

import pytest

from retrain.advantages.pipeline import CreditPipeline
from retrain.backends.declared import incapable
from retrain.config import config_from_mapping
from retrain.data.samplers import build_sampler
from retrain.errors import ConfigurationError
from retrain.types import Example

SENTENCES = Path(__file__).parent / "data" / "wrong_plugins.md"
ADVICE = "; fix it, or set [plugins] strict = false to get only a warning."
"""Ends most sentences; the file has it once."""
LOSS = "import torch\ndef wrong(tokens):\n    return "
ADVANTAGE = "def wrong(rewards):\n    "
ALGORITHM = "from retrain.advantages import AlgorithmOutput\ndef wrong(ctx):\n    "
FORGETFUL = "    def state(self): return {'n': self.n}\n    def load(self, state): pass\n"
WRONG: dict[tuple[str, str], str] = {
    ("loss", "a mean in place of terms"): LOSS + "(-tokens.advantages * tokens.new).mean()",
    ("loss", "a gradient through `old`"): (
        LOSS + "-tokens.advantages * (tokens.new - tokens.old.requires_grad_()).exp()"
    ),
    ("loss", "a write in place"): LOSS + "-tokens.advantages.mul_(2) * tokens.new",
    ("loss", "a call of backward"): (
        "import torch\ndef wrong(tokens):\n    terms = -tokens.advantages * tokens.new\n"
        "    terms.sum().backward()\n    return terms"
    ),
    ("loss", "an exception where no advantage is left"): (
        "import torch\ndef wrong(tokens):\n    assert tokens.advantages.any(), 'nothing to learn'\n"
        "    return -tokens.advantages * tokens.new\nwrong.own_term = True"
    ),
    ("loss", "NaN"): LOSS + "-tokens.advantages * tokens.new * float('nan')",
    ("loss", "another shape"): LOSS + "-(tokens.advantages * tokens.new)[1:]",
    ("advantage", "a mean in place of one per completion"): ADVANTAGE + "return sum(rewards)",
    ("advantage", "NaN"): ADVANTAGE + "return [float('nan') for _ in rewards]",
    ("advantage", "another shape"): ADVANTAGE + "return rewards[1:]",
    ("advantage", "a state that is not restored"): (
        "class wrong:\n    def __init__(self): self.n = 0.0\n"
        "    def __call__(self, rewards):\n"
        "        self.n += 1\n        return [r - self.n for r in rewards]\n" + FORGETFUL
    ),
    ("advantage", "a parameter that is not given"): (
        "def wrong(rewards, params):\n    return [r - params['k'] for r in rewards]"
    ),
    ("advantage", "random numbers"): (
        "import random\n" + ADVANTAGE + "return [random.random() for _ in rewards]"
    ),
    ("uncertainty", "random numbers"): (
        "import random\ndef wrong(logprobs): return [random.random() for _ in logprobs]"
    ),
    ("transform", "random numbers"): (
        "import random\nfrom retrain.advantages import TransformOutput\ndef wrong(ctx):\n"
        "    return TransformOutput([[random.random() for _ in t] for t in ctx.logprobs])"
    ),
    ("transform", "random numbers in a spec"): (
        "import random\nfrom retrain.advantages import TransformSpec\ndef wrong():\n    return"
        " TransformSpec('wrong', post_process=lambda advs, ctx: [[random.random() for _ in row]"
        " for row in advs])"
    ),
    ("transform", "another form"): "def wrong(ctx):\n    return ctx.logprobs",
    ("transform", "a parameter that is not given"): "def wrong(ctx):\n    return ctx.params['k']",
    ("algorithm", "random numbers"): (
        "import random\n" + ALGORITHM + "return AlgorithmOutput([[[random.random() for _ in t] for"
        " t in g] for g in ctx.logprobs])"
    ),
    ("algorithm", "NaN"): (
        ALGORITHM + "return AlgorithmOutput([[[float('nan') for _ in t] for t in g] for g in"
        " ctx.logprobs])"
    ),
    ("algorithm", "another shape"): ALGORITHM + "return AlgorithmOutput(ctx.rewards)",
    ("sampler", "a state that is not restored"): (
        "from retrain.data import PromptSampler\nclass wrong(PromptSampler):\n    n = 0\n"
        "    def choose(self, step, count, uniforms): return [self.n % 8] * count\n"
        "    def observe(self, indices, groups): self.n += 1\n" + FORGETFUL
    ),
    ("sampler", "a state that JSON cannot hold"): (
        "from retrain.data import PromptSampler\nclass wrong(PromptSampler):\n"
        "    def choose(self, step, count, uniforms): return range(count)\n"
        "    def state(self): return {'seen': {1, 2}}"
    ),
    ("sampler", "a parameter that is not given"): (
        "from retrain.data import PromptSampler\nclass wrong(PromptSampler):\n"
        "    def __init__(self, examples, params): self.first = params['first']\n"
        "    def choose(self, step, count, uniforms): return [self.first] * count"
    ),
}
KEYS = {
    "loss": ("loss", "mode"),
    "advantage": ("algorithm", "advantage_mode"),
    "uncertainty": ("algorithm", "uncertainty_kind"),
    "transform": ("algorithm", "transform_mode"),
    "algorithm": ("algorithm", "algorithm_mode"),
    "sampler": ("data", "sampler"),
}


def sentence(kind: str, source: str) -> str:
    """What a run with the plugin says before its first step; "" if nothing."""
    Path("my_plugin.py").write_text(source, encoding="utf-8")
    section, key = KEYS[kind]
    sections: dict[str, dict[str, str]] = {"model": {"model": "lab"}, "data": {"source": "lab"}}
    sections["algorithm"] = {"transform_mode": "gtpo" if kind == "uncertainty" else "none"}
    sections.setdefault(section, {})[key] = "my_plugin.wrong"
    config = config_from_mapping(sections)
    try:
        if kind == "loss":
            return "".join(incapable(config))
        if kind == "sampler":
            build_sampler(config, [Example(f"{n}", "1") for n in range(8)])
        else:
            CreditPipeline(config, lambda ids: [""] * len(ids))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plugin_gets_its_sentence(case: tuple[str, str], here: Path) -> None:
    said = sentence(case[0], WRONG[case])
    assert said and "\n" not in said and "Traceback" not in said
    stored = " ".join(SENTENCES.read_text(encoding="utf-8").split())
    assert f"- **{case[0]}, {case[1]}**: {said.replace(ADVICE, ' ...')} " in f"{stored} "
    assert f'a run adds "{ADVICE}"' in stored
