"""Precedence, flags, variables, provenance; kinds of files; drawn seeds; resuming; keys without
effect; migration.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.backends.base import BackendCapabilities
from retrain.backends.declared import per_token_refusals
from retrain.cli.migrate_config import migrate_text
from retrain.config import (
    TrainConfig,
    config_from_mapping,
    config_from_toml,
    config_hash,
    dump_toml,
    load_config,
    load_stored,
    replaced,
    resume_differences,
    unused_keys,
    with_drawn_seed,
)
from retrain.config.keys import Key, all_keys, flags, keys_by_path, section_models
from retrain.config.names import registered_sources
from retrain.config.needs import refusals
from retrain.config.overrides import parse_overrides, variable_overrides
from retrain.config.values import check_path
from retrain.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        '[training]\nlr = 1e-4\nseed = 7\n[algorithm]\ntransform_params = { cap = 1, kind = "a" }\n'
    )
    return path


# -- precedence ------------------------------------------------------------------------------------


def test_flags_win_over_variables_over_the_file_over_defaults(file: Path) -> None:
    environ = {"RETRAIN_TRAINING_LR": "2e-4", "RETRAIN_TRAINING_MAX_STEPS": "9"}
    assert load_config(file, environ={}).training.lr == 1e-4
    assert load_config(file, environ=environ).training.lr == 2e-4
    config = load_config(file, ["--lr", "3e-4"], environ)
    assert (
        config.training.lr,
        config.training.max_steps,
        config.training.seed,
        config.training.batch_size,
    ) == (3e-4, 9, 7, 8)


def test_each_value_says_where_it_came_from(file: Path) -> None:
    config = load_config(
        file, ["--sepa.steps=10", "--transform-param", "cap=2"], {"RETRAIN_MODEL_LORA_RANK": "4"}
    )
    origins = config.origins
    assert origins["training.lr"] == "file"
    assert origins["model.lora_rank"] == "environment RETRAIN_MODEL_LORA_RANK"
    assert origins["sepa.steps"] == "flag --sepa.steps"
    assert origins["algorithm.transform_params"] == "flag --transform-param"
    assert origins["gtpo.beta"] == "default"
    assert set(origins) == {key.path for key in all_keys()}
    assert config.source_path == file


def test_an_alias_says_where_it_came_from_under_the_canonical_key_and_wins_as_a_flag() -> None:
    flag, grams = ["--entropy-mask-rho", "0.2"], ["--strategic-grams", "wait, hold on"]
    config = config_from_mapping({"algorithm": {"surprisal_mask_rho": 0.5}}, flag + grams)
    assert config.algorithm.surprisal_mask_rho == 0.2
    assert config.planning.grams == ["wait", "hold on"]
    assert config.origins["algorithm.surprisal_mask_rho"] == "flag --entropy-mask-rho"
    file = {"algorithm": {"entropy_mask_rho": 0.5}}
    config = config_from_mapping(file, ["--surprisal-mask-rho", "0.2"])
    assert config.algorithm.surprisal_mask_rho == 0.2


def test_names_of_0_10_still_work() -> None:
    algorithm = {"reference": "gold", "reference_prompt": "{prompt} {answer}"}
    reward = {"type": ["match", "overlong"], "combine": "normalise_then_sum"}
    moving = {"algorithm.reference_coef": [[0, 1.0], [2, 0.0]]}
    config = config_from_mapping(
        {"algorithm": algorithm, "reward": reward, "schedule": moving},
        ["--inference-mismatch-limit", "0.1", "--advantage-mode", "grpo"],
    )
    assert config.algorithm.teacher == "answer"
    assert config.with_(reference="start").algorithm.teacher == "start"
    assert config.algorithm.teacher_prompt == "{prompt} {answer}"
    assert config.reward.combine == "normalize_then_sum"
    assert config.inference.max_logprob_diff == 0.1
    assert list(config.schedule.points) == ["algorithm.teacher_coef"]
    assert "normalise" not in dump_toml(config)
    with pytest.raises(ConfigurationError, match="mean RETRAIN_INFERENCE_RETRY_TIMEOUT_S"):
        variable_overrides({"RETRAIN_INFERENCE_PATIENCE_S": "5"})


def test_errors_name_the_flag_or_the_variable(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(file, ["--lr", "fast"], {"RETRAIN_TRAINING_BATCH_SIZE": "0"})
    for told in (
        'flag --lr: [training] lr = "fast" is a string',
        "environment RETRAIN_TRAINING_BATCH_SIZE: [training] batch_size = 0",
    ):
        assert any(problem.startswith(told) for problem in caught.value.problems)


def test_variables_that_look_like_keys_and_are_none_are_refused() -> None:
    for name, near in (
        ("RETRAIN_TRAINING_LRR", "RETRAIN_TRAINING_LR"),
        ("RETRAIN_TRANING_MAX_STEPS", "RETRAIN_TRAINING_MAX_STEPS"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"environment {name} sets no key; did you mean {near}?"
        ):
            load_config("examples/lab.toml", environ={name: "1"})
    load_config("examples/lab.toml", environ={"RETRAIN_HOME": "/x", "LR": "1"})


def test_a_stored_configuration_does_not_see_variables(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_TRAINING_LR", "1.0")
    assert load_config(file).training.lr == 1.0
    assert load_stored(file).training.lr == 1e-4


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--seed", "-1"], "training.seed", -1),
        (["--lr=1"], "training.lr", 1.0),
        (["--lr", "1e-5"], "training.lr", 1e-5),
        (["--lora-rank", "8"], "model.lora_rank", 8),
        (["--lora-alpha", "8"], "lora.alpha", 8),
        (["--sepa-steps", "10"], "sepa.steps", 10),
        (["--sepa.steps", "10"], "sepa.steps", 10),
        (["--sepa.delay-steps", "10"], "sepa.delay_steps", 10),
        (["--resume", "logs/a"], "resume.from", "logs/a"),
        (["--resume.from", "logs/a"], "resume.from", "logs/a"),
        (["--trust-remote-code"], "model.trust_remote_code", True),
        (["--no-plugins-strict"], "plugins.strict", False),
        (["--plugins-strict=false"], "plugins.strict", False),
        (["--no-inference.prefix-caching"], "inference.prefix_caching", False),
        (["--gradient-checkpointing"], "training.gradient_checkpointing", True),
        (["--gradient-checkpointing", "auto"], "training.gradient_checkpointing", "auto"),
        (["--no-gradient-checkpointing"], "training.gradient_checkpointing", False),
        (["--evaluation-k", "1", "--evaluation-samples", "1"], "evaluation.k", [1]),
        (["--evaluation-k", "1,4", "--evaluation-samples", "4"], "evaluation.k", [1, 4]),
        (["--evaluation-k=[1, 4]", "--evaluation-samples", "4"], "evaluation.k", [1, 4]),
        (["--lora-target-modules", "q_proj,v_proj"], "lora.target_modules", ["q_proj", "v_proj"]),
        (["--reward-type", "math"], "reward.type", "math"),
        (
            ["--reward-type", "match,math", "--reward-weights", "1,0.5"],
            "reward.type",
            ["match", "math"],
        ),
        (["--wandb-tags", "a,b"], "logging.wandb_tags", "a,b"),
        (["--transform-param", "cap=0.1"], "algorithm.transform_params", {"cap": 0.1}),
        (
            ["--advantage-param", "scale=2.0", "--advantage-param", "n=3"],
            "algorithm.advantage_params",
            {"scale": 2.0, "n": 3},
        ),
        (["--algorithm-param", "name=fast lane"], "algorithm.params", {"name": "fast lane"}),
        (["--algorithm-param", "day=2026-01-01"], "algorithm.params", {"day": "2026-01-01"}),
        (["--algorithm-param", 'five="5"'], "algorithm.params", {"five": "5"}),
        (["--algorithm-param", "a.b=[1, 2]"], "algorithm.params", {"a": {"b": [1, 2]}}),
        (["--data.params.depth", "3"], "data.params", {"depth": 3}),
        (["--backend.options.zmq_port=6000"], "backend.options", {"zmq_port": 6000}),
        (["--environment-args", '{"split": "train"}'], "environment.args", {"split": "train"}),
        (["--environment-args", '{split = "train"}'], "environment.args", {"split": "train"}),
        (["--max-steps", "5", "--max-steps", "6"], "training.max_steps", 6),
        (["--data-system-prompt=--be brief"], "data.system_prompt", "--be brief"),
    ],
)
def test_flags_set_keys(argv: list[str], path: str, value: object) -> None:
    config = config_from_mapping({}, argv)
    assert config.value(path) == value
    assert type(config.value(path)) is type(value)


def test_a_table_flag_adds_to_the_table_of_the_file(file: Path) -> None:
    assert load_config(file, ["--transform-param", "cap=2"], {}).algorithm.transform_params == {
        "cap": 2,
        "kind": "a",
    }
    assert load_config(
        file, ["--transform-params", "{cap = 2}"], {}
    ).algorithm.transform_params == {"cap": 2}


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--lrr", "1"], "--lrr is not a flag; did you mean --lr?"),
        (["--training-batch-size", "1"], "is not a flag; did you mean --batch-size?"),
        (["--sepa.step", "1"], "--sepa.step is not a flag; did you mean --sepa-steps?"),
        (["--quite"], "--quite is not a flag; did you mean --quiet?"),
        (["--lr"], "flag --lr needs a value: a number of at least 0."),
        (["--lr", "--seed", "1"], "flag --lr needs a value"),
        (["--no-plugins-strict=true"], "flag --no-plugins-strict takes no value"),
        (["--no-lr"], "--no-lr is not a flag"),
        (["--no-no-plugins-strict"], "--no-no-plugins-strict is not a flag"),
        (["--transform-param", "cap"], "flag --transform-param takes key=value"),
        (
            ["--schedule-points", "5"],
            "such as --schedule-points 'training.lr=[[0, 1e-5], [200, 0]]', and got '5'",
        ),
        (["--transform-param", "cap=[1"], "is not valid TOML"),
        (["--transform-param", "a b=1"], "is not a key; use letters, digits, _ and -"),
        (["--training.lr.x", "1"], "--training.lr.x is not a flag"),
    ],
)
def test_wrong_flags_get_one_sentence(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_overrides(argv, {"--quiet": False})
    assert len(caught.value.problems) == 1
    assert part in caught.value.problems[0]


def test_what_is_no_flag_of_the_configuration_is_passed_on_in_order() -> None:
    parsed = parse_overrides(
        ["a.toml", "--quiet", "--lr", "1", "--format", "json", "--", "--b"],
        {"--quiet": False, "--format": True},
    )
    assert parsed.rest == ("a.toml", "--quiet", "--format", "json", "--b")
    assert [(override.path, override.value) for override in parsed.given] == [("training.lr", 1.0)]


@given(
    st.sampled_from(all_keys()),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_any_text_as_a_value_is_taken_or_refused_in_sentences(key: Key, text: str) -> None:
    try:
        config_from_mapping(
            {"campaign": {}} if key.section == "campaign" else {}, [f"{key.flag}={text}"]
        )
    except ConfigurationError as error:
        assert all(problem.endswith((".", "?")) for problem in error.problems)


def test_every_flag_reaches_its_key() -> None:
    for flag, path in flags().items():
        if flag.startswith("--campaign"):
            continue
        with pytest.raises(ConfigurationError, match=r"flag --") as caught:
            config_from_mapping({}, [f"{flag}=\ud800"])  # a lone surrogate is no value of any key
        assert flag in str(caught.value), path


# -- kinds of files --------------------------------------------------------------------------------


def test_the_kind_of_a_file_follows_from_its_sections() -> None:
    assert TrainConfig().kind == "run"
    assert config_from_toml("[training]\n[squeeze]\nmin_variance_retention = 0.9").kind == "run"
    assert config_from_toml('[squeeze]\nadapter_path = "a"').kind == "squeeze"
    assert config_from_toml('[campaign]\n[squeeze]\nadapter_path = "a"').kind == "campaign"


def test_a_file_that_squeezes_nothing_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "squeeze.toml").write_text(
        "[squeeze]\nmin_variance_retention = 0.9\n[model]\nlora_rank = 8"
    )
    with pytest.raises(
        ConfigurationError, match=r"squeeze.toml: \[squeeze\] needs adapter_path, the folder"
    ):
        load_config(tmp_path / "squeeze.toml", environ={})
    assert load_config(tmp_path / "squeeze.toml", ["--lr", "1e-4"], environ={}).kind == "run"


def test_on_a_campaign_steps_and_seed_mean_the_campaigns(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text("[campaign]\nmax_steps = 50\nseeds = [1, 2]\n")
    config = load_config(path, ["--max-steps", "5", "--seed", "9", "--log-dir", "logs/c"], {})
    assert config.campaign is not None and config.logging.log_dir == "logs/c"
    assert (config.campaign.max_steps, config.campaign.seeds) == (5, [9])
    with pytest.raises(ConfigurationError, match="flag --seed"):
        load_config(path, ["--seed", "-1"], {})


def test_a_campaigns_flag_needs_a_campaign(file: Path) -> None:
    with pytest.raises(ConfigurationError, match="flag --campaign-parallel belongs to a campaign"):
        load_config(file, ["--campaign-parallel"], {})
    assert load_config(file, environ={"RETRAIN_CAMPAIGN_PRICE_PER_HOUR": "2"}).campaign is None


def test_labels_take_the_last_part_of_a_path() -> None:
    config = config_from_toml('[algorithm]\nadvantage_mode = "a.b.mine"\ntransform_mode = "none"')
    assert config.condition_label == "mine+none"
    pair = config_from_toml('[algorithm]\nalgorithm_mode = "maxrl_gtpo"')
    assert pair.condition_label == "maxrl_gtpo"


def test_an_algorithm_brings_its_aggregation_along() -> None:
    pair = "grpo_constant"
    config = config_from_toml(f'[algorithm]\nalgorithm_mode = "{pair}"')
    assert config.loss.aggregation == "constant"
    assert config_from_mapping({}, ["--algorithm-mode", pair]).loss.aggregation == "constant"
    own = config_from_mapping({"loss": {"aggregation": "dr_grpo"}}, ["--algorithm-mode=grpo_none"])
    assert own.loss.aggregation == "constant"
    assert TrainConfig().loss.aggregation == "token_mean"
    stored = config_from_toml(dump_toml(config).replace(pair, "dr_grpo"))  # as 0.9 stored it
    assert stored.algorithm.algorithm_mode == pair and stored.loss.mode == "importance_sampling"


def test_a_source_that_python_registered_is_known() -> None:
    data = {"data": {"source": "my_registered_source"}}
    with pytest.raises(ConfigurationError):
        config_from_mapping(data)
    registered_sources.add("my_registered_source")
    assert config_from_mapping(data).data.source == "my_registered_source"


@pytest.mark.parametrize("alias", ["nll", "neg_logprob", "entropy", "shannon", "pred_var"])
def test_an_uncertainty_by_another_name_is_stored_under_its_own(alias: str) -> None:
    kinds = {"pred_var": "predictive_variance"}
    kinds |= dict.fromkeys(("entropy", "shannon"), "shannon_entropy")
    algorithm = config_from_mapping({"algorithm": {"uncertainty_kind": alias}}).algorithm
    assert algorithm.uncertainty_kind == kinds.get(alias, "surprisal")


# -- seeds and changed values ----------------------------------------------------------------------


def test_a_seed_is_drawn_once_and_is_then_ordinary() -> None:
    drawn = with_drawn_seed(TrainConfig())
    assert 0 <= drawn.training.seed < 2**32
    assert with_drawn_seed(drawn) == drawn
    assert config_from_toml(dump_toml(drawn)).training.seed == drawn.training.seed
    assert drawn.origins["training.seed"] == "drawn"
    assert with_drawn_seed(TrainConfig()).training.seed != drawn.training.seed


def test_replaced_values_are_validated_and_unset_keys_stay_unset(file: Path) -> None:
    config = replaced(
        load_config(file, environ={}), {"backend.devices": "cpu", "resume.from": "logs/a"}
    )
    assert config.is_set("backend.devices") and not config.is_set("backend.adapter_path")
    assert config.source_path == file and config.resume.from_ == "logs/a"
    with pytest.raises(ConfigurationError, match="lr = -1 is out of range"):
        replaced(config, {"training.lr": -1})


# -- resuming --------------------------------------------------------------------------------------

MAY_CHANGE = {
    "resume": {"from": "logs/a"},
    "training": {"max_hours": 1.0, "max_steps": 900, "save_every": 3, "keep_checkpoints": 4},
    "reward": {"workers": 3},
    "evaluation": {"every": 5, "samples": 4, "k": [1, 4]},
    "logging": {"log_dir": "logs/b", "wandb_project": "p"},
    "backend": {"adapter_path": "/tmp/a", "max_concurrent": 9, "throttle_dir": "locks"},
    "inference": {"url": "http://127.0.0.1:2"},
    "model": {"base_url": "http://127.0.0.1:2"},
}


def test_what_may_change_at_resume_is_neither_a_difference_nor_in_the_hash() -> None:
    changed = config_from_mapping(MAY_CHANGE)
    assert resume_differences(TrainConfig(), changed) == []
    assert config_hash(TrainConfig()) == config_hash(changed)


def test_every_other_difference_is_refused_with_both_values() -> None:
    stored, current = (
        TrainConfig(),
        config_from_mapping(
            {"training": {"lr": 1.0}, "loss": {"clip_low": 0.1}, "data": {"params": {"a": 1}}}
        ),
    )
    differences = resume_differences(stored, current)
    assert len(differences) == 3
    assert differences[0].startswith("[training] lr = 1.0 differs from 4e-05, the run's own value")
    assert "[loss] clip_low = 0.1 differs from unset" in differences[1]
    assert config_hash(stored) != config_hash(current)


@pytest.mark.parametrize(
    ("stored", "current", "same"),
    [
        ("gpu:0", "cuda:3", True),
        ("gpu:0", "cpu", False),
        ("gpu:0", "gpu:0,gpu:1", False),
        (None, "cpu", True),
        ("cpu", None, True),
    ],
)
def test_devices_may_change_within_their_kind(
    stored: str | None, current: str | None, same: bool
) -> None:
    old, new = (
        config_from_mapping({"backend": {"devices": name}} if name else {})
        for name in (stored, current)
    )
    assert (resume_differences(old, new) == []) is same


# -- keys without effect ---------------------------------------------------------------------------


NO_OUTPUT = "without output_path the job compresses nothing."
NO_SINGLE_SQUEEZE = "a single run has no adapter_path to squeeze."
ENVIRONMENT = 'environment.provider = "verifiers"\nenvironment.id = "a/b"'
EVALUATED = 'squeeze.output_path = "b"\nsqueeze.evaluate = true\nevaluation.max_examples = 9'
PLAIN = 'algorithm.transform_mode = "none"'


@pytest.mark.parametrize(
    ("rest", "key", "reason"),
    [
        ("", 'inference.url = "http://x"', 'engine "pytorch" samples in this process.'),
        (
            'backend.backend = "tinker"',
            'inference.dtype = "bf16"',
            "Tinker samples by itself.",
        ),
        (
            'environment.provider = "my.Game"',
            'environment.id = "x"',
            "the plugin is the environment.",
        ),
        (ENVIRONMENT, 'data.source = "lab"', "the problems come from [environment]."),
        (ENVIRONMENT, 'reward.type = "math"', "the rubric of [environment] scores."),
        (
            'backend.backend = "prime_rl"',
            "backend.options.zmq_port = 6000",
            'transport is "filesystem".',
        ),
        (
            "",
            "backend.options.trainer_ranks = 2",
            'it is an option of prime_rl, and backend is "local".',
        ),
        ("", "hicra.alpha = 0.5", "no transform here uses HICRA."),
        (PLAIN, "hicra.alpha = 0.2", "no transform here uses HICRA."),
        (PLAIN, "gtpo.beta = 0.1", "no transform here uses GTPO weights."),
        ("training.lr = 1e-4", "squeeze.per_layer = true", NO_SINGLE_SQUEEZE),
        ('squeeze.adapter_path = "a"', "squeeze.compress_to = 4", NO_OUTPUT),
        ('squeeze.adapter_path = "a"', "squeeze.evaluate = true", NO_OUTPUT),
        (
            'squeeze.adapter_path = "a"',
            "sepa.steps = 9",
            "a squeeze job without evaluate reads [squeeze] alone.",
        ),
        (
            f'squeeze.adapter_path = "a"\n{EVALUATED}',
            "sepa.steps = 9",
            "a squeeze job does not train.",
        ),
        (
            "",
            "loss.clip_low = 0.1",
            'it belongs to mode = "ppo", "gspo", "cispo", "gmpo" or "dppo".',
        ),
        ("", 'model.base_url = "http://x"', "it belongs to the tinker backend."),
        (
            "campaign = {}",
            'algorithm.advantage_mode = "grpo"',
            "the conditions of the campaign set the algorithm.",
        ),
        ("campaign = {}", "hicra.alpha = 0.5", ""),
        # It varies the file's own algorithm.
        (f'campaign.grid."training.lr" = [1e-4]\n{PLAIN}', 'algorithm.advantage_mode = "grpo"', ""),
        ('algorithm.transform_mode = "my.plugin"', "hicra.alpha = 0.5", ""),
        ('model.model = "lab"', 'model.revision = "a"', "only a model of the hub has revisions."),
        ('model.model = "/"', 'model.revision = "a"', "only a model of the hub has revisions."),
        ('model.model = "a/of-the-hub"', 'model.revision = "a"', ""),
        ("", "sepa.steps = 9", ""),
    ],
)
def test_a_key_without_effect_is_said_with_the_reason(rest: str, key: str, reason: str) -> None:
    path, _, value = key.partition(" = ")
    section, _, name = path.rpartition(".")
    told = [f"[{section}] {name} = {value} has no effect: {reason}"] if reason else []
    assert unused_keys(config_from_toml(f"{rest}\n{key}")) == told


def test_keys_without_effect_for_one_reason_share_a_sentence() -> None:
    text = '[algorithm]\ntransform_mode = "gtpo"\n[sepa]\nsteps = 9\ndelay_steps = 3'
    told = (
        "[sepa] steps = 9 and [sepa] delay_steps = 3 have no effect: no transform here uses SEPA."
    )
    assert unused_keys(config_from_toml(text)) == [told]


@pytest.mark.parametrize(
    "transform", ["gtpo", "gtpo_sepa", "entropy_mask", "my_module.my_transform"]
)
def test_a_backend_of_one_advantage_a_completion_takes_no_token_varying_transform(
    transform: str,
) -> None:
    config = config_from_mapping(
        {"algorithm": {"transform_mode": transform, "surprisal_mask_rho": 0.2}}
    )
    one = BackendCapabilities(False, synchronous_loss=True, exact_resume=True)
    assert len(per_token_refusals(config, one)) == 1
    assert any("surprisal_mask_rho = 0.2" in said for _, said in refusals(config, one))
    every = replace(one, per_token_advantages=True)
    assert per_token_refusals(config, every) == []
    plain = config_from_mapping({"algorithm": {"algorithm_mode": "grpo_none"}})
    assert per_token_refusals(plain, one) == []


# -- migration -------------------------------------------------------------------------------------

LEGACY = """\
# my run
[backend]
backend = "prime_rl"     # external
prime_rl_transport = "zmq"  # fast
prime_rl_zmq_port = 6000

[training]
lr = 1e-4   # tuned
"""


def test_a_file_without_legacy_keys_is_returned_byte_for_byte() -> None:
    text = '[backend]\r\noptions={transport="zmq"}#x\r\n'
    assert migrate_text(text) == text


def test_migration_keeps_comments_and_works_in_every_form_of_table() -> None:
    for text in (
        '[backend]\noptions = { zmq_hwm = 3 } # few\nprime_rl_transport = "zmq"  # fast\n',
        '[backend]\nprime_rl_transport = "zmq" # fast\n[backend.options]\nzmq_hwm = 3 # few\n',
        '[backend]\nprime_rl_transport = "zmq" # fast\noptions.zmq_hwm = 3 # few\n',
        'backend.prime_rl_transport = "zmq" # fast\nbackend.prime_rl_zmq_hwm = 3 # few\n',
        'backend = { prime_rl_transport = "zmq", prime_rl_zmq_hwm = 3 } # few and fast\n',
    ):
        new = migrate_text(text)
        assert config_from_toml(new).backend.options == {"transport": "zmq", "zmq_hwm": 3}
        assert "few" in new and "fast" in new


def test_a_migrated_file_of_crlf_lines_stays_one() -> None:
    new = migrate_text(LEGACY.replace("\n", "\r\n"))
    assert "prime_rl_" not in new
    assert new.count("\n") == new.count("\r\n")


def test_contradicting_legacy_keys_are_not_decided_for_the_user() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"prime_rl_zmq_port = 1 and \[backend.options\] zmq_port = 2 contradict each other",
    ):
        migrate_text("[backend]\nprime_rl_zmq_port = 1\noptions = { zmq_port = 2 }\n", "a.toml")


def test_migrating_what_is_no_toml_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a\.toml is not valid TOML: .*line 1"):
        migrate_text("[backend\n", "a.toml")


NAMES_A_PATH = re.compile(r"\b([Ff]older|[Ff]ile|path)\b")
NO_PATHS = {"environment.provider", "inference.api_key_env"}
TABLES_OF_PATHS = {
    "evaluation.tasks": {"gsm8k": {"path": ...}},
    "backend.options": {"output_dir": ...},
}
PATH_KEYS = [
    key
    for key in all_keys()
    if key.path in TABLES_OF_PATHS
    or (str in key.kinds and NAMES_A_PATH.search(key.doc) and key.path not in NO_PATHS)
    or check_path in key.field.metadata
]


def filled(holder: Any, path: str) -> Any:
    if isinstance(holder, dict):
        return {name: filled(item, path) for name, item in holder.items()}
    return path


def test_a_folder_whose_name_looks_like_a_variable_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH", raising=False)
    Path("$SCRATCH").mkdir()
    assert config_from_mapping({"logging": {"log_dir": "$SCRATCH"}}).logging.log_dir == "$SCRATCH"
    monkeypatch.setenv("SCRATCH", "/a")
    assert config_from_mapping({"logging": {"log_dir": "$SCRATCH"}}).logging.log_dir == "/a"


def test_every_path_key_expands_home_and_variables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(PATH_KEYS) >= 15
    for key in [*PATH_KEYS, keys_by_path()["evaluation.source"]]:
        holder = TABLES_OF_PATHS.get(key.path, ...)

        def read(path: str, key: Key = key, holder: Any = holder) -> Any:
            section = section_models()[key.section].model_validate({key.name: filled(holder, path)})
            return section.model_dump(by_alias=True)[key.name]

        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setenv("SCRATCH", "/scratch")
        for text, meant in (
            ("~/a/${SCRATCH}b.jsonl", "/home/me/a//scratchb.jsonl"),
            ("$SCRATCH/b.jsonl", "/scratch/b.jsonl"),
            ("a~/5$.jsonl", "a~/5$.jsonl"),
        ):
            assert read(text) == filled(holder, meant), key.path
            monkeypatch.setenv("HOME", "/another")
            assert read(meant) == filled(holder, meant), key.path
            monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.delenv("SCRATCH")
        with pytest.raises(ConfigurationError) as caught:
            config_from_mapping({key.section: {key.name: filled(holder, "$SCRATCH/b.jsonl")}})
        (sentence,) = caught.value.problems
        assert sentence.startswith(f"configuration: [{key.section}] {key.name} = ")
        assert "names $SCRATCH, and no variable has that name" in sentence
