"""Every key that a backend or an engine could use: it does, or a sentence says that it does not."""

import re
from typing import Any

import pytest

from retrain.backends.base import BackendCapabilities
from retrain.backends.declared import BACKEND_SECTIONS, ENGINE_SECTIONS, incapable
from retrain.config import (
    TrainConfig,
    config_from_mapping,
    config_from_toml,
    dump_toml,
    replaced,
    unused_keys,
)
from retrain.config.keys import Key, all_keys
from retrain.config.names import bracketed, builtin_names
from retrain.config.needs import Part, built_in, refusals
from retrain.config.unused import ROWS
from retrain.errors import ConfigurationError
from retrain.inference_engine.base import EngineCapabilities

PARTS = [built_in("backend", name) for name in builtin_names("backend")]
PARTS += [built_in("engine", name) for name in builtin_names("engine")]
OTHERS: dict[str, Any] = {
    "backend.devices": "cpu",
    "backend.options": {"transport": "zmq"},
    "training.gradient_checkpointing": True,
    "training.lr": 1e-3,
    "training.top_k": 5,
    "training.top_p": 0.9,
    "training.keep_checkpoints": 3,
    "lora.target_modules": ["q_proj"],
    "loss.mode": "ppo",
    "loss.clip_low": 0.1,
    "loss.clip_high": 0.3,
    "loss.dual_clip": 3.0,
    "loss.kl_estimator": "k2",
    "loss.params": {"tau_pos": 2.0},
    "loss.correction": "tis",
    "loss.old_logprobs": "recomputed",
    "loss.correction_low": 0.4,
    "inference.max_logprob_diff": 0.5,
    "inference.url": "http://127.0.0.1:9",
}
"""Values where half of the default, or one more, would be another mistake or is no value."""
WITH: dict[str, dict[str, Any]] = {
    "loss.clip_low": {"loss.mode": "ppo"},
    "loss.clip_high": {"loss.mode": "ppo"},
    "loss.dual_clip": {"loss.mode": "ppo"},
    "loss.kl_estimator": {"loss.kl_coef": 0.1},
    "loss.kl_reference": {"loss.kl_coef": 0.1},
    "training.lr_horizon": {"training.lr_schedule": "linear"},
    "loss.params": {"loss.mode": "sapo"},
    "loss.correction": {"loss.old_logprobs": "recomputed"},
    "loss.correction_cap": {"loss.old_logprobs": "recomputed", "loss.correction": "tis"},
    "loss.correction_low": {"loss.old_logprobs": "recomputed", "loss.correction": "icepop"},
    "loss.correction_high": {"loss.old_logprobs": "recomputed", "loss.correction": "icepop"},
}
"""What a key needs beside it to have an effect anywhere."""


def another(key: Key) -> Any:
    """An allowed value that is not the default."""
    if key.path in OTHERS:
        return OTHERS[key.path]
    if key.choices:
        return next(choice for choice in key.choices if choice != key.default)
    if isinstance(key.default, bool):
        return not key.default
    if isinstance(key.default, int):
        return key.default + 1
    if isinstance(key.default, float):
        return key.default / 2 or 0.5
    return "other"


def configuration(path: str, value: Any, **names: str) -> TrainConfig:
    """One key, with what it needs; `names` are those of the backend or the engine."""
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"advantage_mode": "grpo", "transform_mode": "none"}
    }
    given = {"backend.backend": names.get("backend"), "inference.engine": names.get("engine")}
    for name, setting in {**given, **WITH.get(path, {}), path: value}.items():
        section, _, own = name.partition(".")
        sections.setdefault(section, {}).update({own: setting} if setting is not None else {})
    return TrainConfig.model_validate(sections)  # what `load` adds is told below


APART = ("backend.backend", "inference.engine", "backend.options")
"""Of the options, each has a sentence of its own."""
CELLS = [
    (part, key)
    for part in PARTS
    for key in all_keys()
    if key.section in (BACKEND_SECTIONS if part.kind == "backend" else ENGINE_SECTIONS)
    and key.path not in APART
    and (part.name, key.section) != ("local", "inference")
]


@pytest.mark.parametrize(
    ("part", "key"), CELLS, ids=[f"{part.name}-{key.path}" for part, key in CELLS]
)
def test_every_key_is_used_or_a_sentence_says_that_it_is_not(part: Part, key: Key) -> None:
    config = configuration(key.path, another(key), **{part.kind: part.name})
    outcome, because = part.outcome(key, config)
    named = f"{bracketed(key.path)} = "
    unused = [sentence for sentence in unused_keys(config) if named in sentence]
    refused = [sentence for sentence in incapable(config) if named in sentence]
    if outcome == "used":
        assert not unused and (
            not refused or part.kind == "engine" or (part.name, key.path) in FOLLOWED
        )
    else:
        (sentence,) = refused if outcome == "refused" else unused
        assert because in sentence
    if refused:
        with pytest.raises(ConfigurationError, match=re.escape(refused[0])):
            config_from_mapping(config.model_dump(exclude_unset=True, by_alias=True))


FOLLOWED = {("tinker", "training.temperature"), ("prime_rl", "loss.aggregation")}
"""Keys of which a backend can follow one value alone."""


def test_a_part_names_what_some_key_needs_and_every_need_is_some_parts_matter() -> None:
    needed = {word for key in all_keys() for word in key.traits.needs.split()}
    nothing = config_from_mapping({})
    named = {word for part in PARTS for word in (*part.lacks, *part.facts.decides(nothing))}
    none = EngineCapabilities(in_process=True, adapter_reload=True, logprobs="sampled")
    one = BackendCapabilities(
        per_token_advantages=False, synchronous_loss=True, exact_resume=True, sampler=none
    )
    plugin = Part("backend", "my_backends.Mine", one)
    assert needed == named | {*plugin.lacks}


def test_what_is_refused_is_told_in_one_sentence_with_a_way_out() -> None:
    for part in PARTS:
        for because in part.lacks.values():
            assert not because.endswith("."), because
            assert any(word in because for word in ("leave it", "leave out", "use ")), because


@pytest.mark.parametrize("part", PARTS[:3], ids=[part.name for part in PARTS[:3]])
def test_a_default_that_is_written_out_is_judged_like_any_value(part: Part) -> None:
    for key in all_keys():
        if key.section not in BACKEND_SECTIONS or key.default is None or key.path in APART:
            continue
        config = configuration(key.path, key.default, **{part.kind: part.name})
        named = f"{bracketed(key.path)} = "
        refused = [sentence for sentence in incapable(config) if named in sentence]
        is_refused = (part.name, key.path) == ("tinker", "training.temperature")
        assert bool(refused) == is_refused, (key.path, refused)
        if part.outcome(key, config)[0] == "unused":
            assert any(named in sentence for sentence in unused_keys(config)), key.path


SITUATIONS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "algorithm": {"advantage_mode": "grpo", "transform_mode": "none"},
        "data": {"source": "gsm8k"},
    },
    {
        "algorithm": {
            "algorithm_mode": "grpo_constant",
            "transform_params": {"uncertainty_kind": "surprisal"},
        },
        "gtpo": {"beta": 0.0},
    },
    {
        "algorithm": {
            "transform_mode": "gtpo",
            "transform_params": {"uncertainty_kind": "surprisal"},
        },
        "gtpo": {"beta": 0.0},
    },
    {
        "environment": {"provider": "reasoning_gym", "id": "x"},
        "sepa": {"schedule": "linear", "steps": 9},
    },
    {
        "planning": {"detector": "semantic"},
        "loss": {"mode": "ppo", "aggregation": "constant"},
        "data": {"source": "lab"},
        "model": {"model": "lab"},
    },
    {"squeeze": {"adapter_path": "a"}},
    {"squeeze": {"adapter_path": "a", "output_path": "b", "evaluate": True}},
    {"campaign": {"seeds": [1, 2], "max_steps": 3}},
    {"campaign": {"launcher": "ray"}},
    {"campaign": {"seeds": [1, 2], "stop": "evidence"}},
    {"reward": {"type": "random"}, "logging": {"generations_every": 0}},
    {"loss": {"mode": "sapo"}, "model": {"train": "full"}},
    {"loss": {"mode": "my_losses.mine"}},
)


def test_every_reason_for_a_key_without_effect_is_said_of_its_default_too() -> None:
    for row in ROWS:
        situation = next(
            (found for found in SITUATIONS if row.when(config_from_mapping(found))), None
        )
        assert situation is not None, f"no situation here is one in which {row.because}"
        for key in (key for key in all_keys() if row.covers(key.path) and key.default is not None):
            own = situation.get(key.section, {})
            if key.name in own or (key.section == "campaign" and "campaign" not in situation):
                continue
            config = config_from_mapping({**situation, key.section: {**own, key.name: key.default}})
            assert any(bracketed(key.path) in said for said in unused_keys(config)) == row.when(
                config
            ), (key.path, row.because)


def test_a_file_that_retrain_wrote_is_not_told_of_its_defaults() -> None:
    assert not unused_keys(config_from_toml(dump_toml(config_from_mapping(SITUATIONS[0]))))


def test_values_that_another_key_implies_are_not_the_users() -> None:
    tinker = config_from_mapping({"backend": {"backend": "tinker"}, "training": {"lr": 1e-4}})
    assert tinker.training.temperature == 1.0 and not tinker.is_set("training.temperature")
    assert tinker.origins["training.temperature"] == "implied by backend.backend"
    assert replaced(tinker, {"backend.backend": "local"}).training.temperature == 0.7
    squeeze = config_from_mapping(
        {"squeeze": {"adapter_path": "a"}, "backend": {"backend": "tinker"}}
    )
    assert not any("temperature" in sentence for sentence in unused_keys(squeeze))


def test_every_reason_of_one_key_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        config_from_mapping(
            {
                "backend": {"shard_base": True},
                "model": {"load_in_4bit": True},
                "inference": {"dtype": "bf16", "engine": "vllm"},
            }
        )
    said = [problem.partition(": ")[2] for problem in refused.value.problems]
    assert sum(each.startswith("[backend]") for each in said) == 3


@pytest.mark.parametrize("key", ["mode", "correction", "aggregation"])
def test_a_plugin_gets_no_advice_that_would_be_refused_too(key: str) -> None:
    loss = {key: "my_losses.mine", "old_logprobs": "recomputed"}
    with pytest.raises(ConfigurationError) as refused:
        config_from_mapping({"backend": {"backend": "prime_rl"}, "loss": loss})
    (sentence,) = [said for said in refused.value.problems if f"[loss] {key} = " in said]
    assert "built-in" not in sentence


def test_a_plugin_may_list_its_losses_in_any_sequence() -> None:
    declared = BackendCapabilities(
        per_token_advantages=True,
        synchronous_loss=True,
        exact_resume=True,
        losses=["ppo"],  # type: ignore[arg-type]
    )
    config = config_from_mapping({"backend": {"backend": "my_backends.Mine"}})
    ((key, _),) = refusals(config, declared)
    assert key == "loss.mode"


def test_minus_zero_switches_off_as_zero_does() -> None:
    for off in (0.0, -0.0):
        (sentence,) = unused_keys(
            config_from_mapping({"loss": {"kl_coef": off, "kl_estimator": "k2"}})
        )
        assert sentence.endswith("has no effect: kl_coef is 0.")
