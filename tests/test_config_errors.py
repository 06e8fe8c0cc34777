"""Wrong configurations and the sentence that each gets: place, section, key, value, what is
allowed, the nearest name.
"""

from pathlib import Path

import pytest

from retrain.config import config_from_mapping, config_from_toml, load_config, rules
from retrain.config.names import builtin_names
from retrain.errors import ConfigurationError

WRONG: list[tuple[str, str, str]] = [
    # name, TOML, a part of the one sentence that it gets
    (
        "unknown section",
        "[trainng]\nlr = 1.0",
        "[trainng] is not a section; did you mean [training]?",
    ),
    (
        "unknown key",
        "[training]\nbatch_sise = 4",
        "[training] batch_sise is not a key; did you mean batch_size?",
    ),
    (
        "key of another section",
        "[training]\nlora_rank = 4",
        "[training] lora_rank is not a key; lora_rank belongs under [model].",
    ),
    (
        "key outside of a section",
        "lr = 1.0",
        "lr = 1.0 stands outside of a section; it belongs under [training].",
    ),
    ("section that is a value", "training = 3", "[training] is a section, and here it is 3."),
    (
        "text for an integer",
        '[training]\nbatch_size = "8"',
        (
            '[training] batch_size = "8" is a string; allowed: an integer of at least 1 and at most'
            " 1000000."
        ),
    ),
    (
        "fraction for an integer",
        "[training]\ngroup_size = 4.0",
        "[training] group_size = 4.0 is a number with a fraction; allowed:",
    ),
    (
        "boolean for an integer",
        "[sepa]\nsteps = true",
        "[sepa] steps = true is a boolean; allowed: an integer of at least 0.",
    ),
    (
        "integer for a boolean",
        "[plugins]\nstrict = 1",
        "[plugins] strict = 1 is an integer; allowed: true or false.",
    ),
    (
        "text for a number",
        '[training]\nlr = "fast"',
        '[training] lr = "fast" is a string; allowed: a number of at least 0.',
    ),
    (
        "not a number",
        "[training]\nlr = nan",
        "[training] lr = nan is not a finite number; allowed: a number of at least 0.",
    ),
    (
        "infinite",
        "[reward]\nweights = [inf]",
        "[reward] weights = [inf] holds a number that is not finite",
    ),
    (
        "temperature zero",
        "[training]\ntemperature = 0",
        "[training] temperature = 0 is out of range; allowed: a number above 0.",
    ),
    (
        "seed too large",
        "[training]\nseed = 4294967296",
        "allowed: an integer of at least -1 and at most 2**32 - 1.",
    ),
    (
        "closed set",
        '[loss]\nkl_estimator = "k4"',
        'kl_estimator = "k4" is not one of its values; allowed: "k1", "k2" or "k3"',
    ),
    ("open name of a loss", '[loss]\nmode = "pppo"', 'my_module.my_loss; did you mean "ppo"?'),
    ("closed set, nearest", '[sepa]\nschedule = "liner"', 'did you mean "linear"?'),
    (
        "open name, nearest",
        '[algorithm]\nadvantage_mode = "maxlr"',
        'advantage_mode = "maxlr" is not known; allowed: grpo, maxrl, rloo',
    ),
    (
        "open name, plugin form",
        '[reward]\ntype = "mine"',
        "or a dotted plugin path such as my_module.my_reward",
    ),
    (
        "unknown alias",
        '[algorithm]\nuncertainty_kind = "varentropy"',
        'uncertainty_kind = "varentropy" is not known',
    ),
    (
        "list item",
        '[logging]\ntrackers = ["wandbb"]',
        'trackers = ["wandbb"] holds "wandbb"; allowed: a list, each "wandb", "trackio"',
    ),
    (
        "bare gpu",
        '[backend]\ndevices = "gpu"',
        '[backend] devices = "gpu" is not a device; allowed: cpu, mps, gpu:N or cuda:N',
    ),
    ("three devices", '[backend]\ndevices = "gpu:0,gpu:1,gpu:2"', "names 3 devices"),
    ("one device twice", '[backend]\ndevices = "gpu:0,cuda:0"', "names a device twice"),
    (
        "legacy key",
        '[backend]\nprime_rl_transport = "zmq"',
        "was moved to [backend.options] transport; run `retrain migrate-config",
    ),
    (
        "unknown option",
        "[backend]\noptions = { zmq_prot = 1 }",
        'zmq_prot is not a known option; did you mean "zmq_port"?',
    ),
    (
        "wrong option",
        "[backend]\noptions = { zmq_port = 0 }",
        "zmq_port = 0 is refused; allowed: an integer of at least 1",
    ),
    (
        "loose advantages",
        "[backend]\noptions = { strict_advantages = false }",
        "strict_advantages = false is refused",
    ),
    (
        "alias and key",
        "[algorithm]\nentropy_mask_rho = 0.2\nsurprisal_mask_rho = 0.2",
        "entropy_mask_rho is another name of [algorithm]",
    ),
    (
        "grams twice",
        '[logging]\nstrategic_grams = "a"\n[planning]\nstrategic_grams = "b"',
        "[planning] strategic_grams and both are given",
    ),
    (
        "gram without a word",
        '[planning]\nstrategic_grams = ["?!"]',
        'holds "?!", a gram without a word',
    ),
    (
        "grams, broken JSON",
        "[planning]\nstrategic_grams = '[\"a\"'",
        "starts like a JSON array and is not valid JSON",
    ),
    (
        "arguments, not JSON",
        '[environment]\nargs = "split=train"',
        'args = "split=train" is not valid JSON',
    ),
    ("arguments, no object", '[environment]\nargs = "[1]"', "is JSON, but not an object"),
    (
        "date in a table",
        "[data]\nparams = { day = 2026-01-01 }",
        "holds 2026-01-01, which is a date; write it as a string",
    ),
    (
        "ramp without steps",
        "[sepa]\nsteps = 0",
        '[sepa] steps = 0 with schedule = "linear" keeps lambda at 0 for ever',
    ),
    (
        "mask without rho",
        '[algorithm]\ntransform_mode = "entropy_mask"',
        '"entropy_mask" needs surprisal_mask_rho above 0',
    ),
    (
        "alpha above one",
        "[hicra]\nalpha = 1.5",
        "[hicra] alpha = 1.5 is out of range; allowed: a number of at least 0 and at most 1.",
    ),
    (
        "negative beta",
        "[gtpo]\nbeta = -0.1",
        "[gtpo] beta = -0.1 is out of range; allowed: a number of at least 0.",
    ),
    (
        "correction alone",
        '[loss]\ncorrection = "tis"',
        '[loss] correction = "tis" needs old_logprobs = "recomputed"',
    ),
    (
        "one token",
        "[training]\ntop_k = 1",
        "[training] top_k = 1 keeps one token, so all completions of a prompt are equal",
    ),
    (
        "nucleus of nothing",
        "[training]\ntop_p = 0.0",
        "[training] top_p = 0.0 is out of range; allowed: a number above 0 and at most 1.",
    ),
    (
        "every token",
        "[training]\nmin_p = 1.0",
        "[training] min_p = 1.0 is out of range; allowed: a number of at least 0 and below 1.",
    ),
    (
        "less than no token",
        "[training]\ntop_k = -1",
        "[training] top_k = -1 is out of range; allowed: an integer of at least 0.",
    ),
    (
        "one checkpoint",
        "[training]\nkeep_checkpoints = 1",
        "keep_checkpoints = 1 would leave nothing to fall back on",
    ),
    (
        "group of one",
        "[training]\ngroup_size = 1",
        '[training] group_size = 1 gives every completion an advantage of 0 with "maxrl"',
    ),
    ("judge alone", '[reward]\ntype = "judge"', '[reward] type = "judge" needs judge_model'),
    (
        "custom alone",
        '[reward]\ntype = ["match", "custom"]',
        '[reward] type = "custom" needs custom_module',
    ),
    (
        "weights",
        '[reward]\ntype = ["match", "math"]\nweights = [1.0]',
        "weights has 1 numbers and type has 2 rewards",
    ),
    ("jsonl alone", '[data]\nsource = "jsonl"', '[data] source = "jsonl" needs path'),
    ("template", '[data]\nprompt_template = "Solve it."', "prompt_template has no {prompt} in it"),
    (
        "environment without id",
        '[environment]\nprovider = "verifiers"',
        "needs id, the environment to load",
    ),
    ("environment without provider", '[environment]\nid = "a/b"', 'needs provider = "verifiers"'),
    (
        "greedy samples",
        "[evaluation]\nsamples = 4\ntemperature = 0",
        "would be 4 equal completions at temperature = 0",
    ),
    (
        "minibatches",
        "[training]\nminibatches = 200",
        "minibatches = 200 is more than the 128 completions of a step",
    ),
    (
        "icepop bounds",
        "[loss]\ncorrection_low = 9.0",
        "correction_low = 9.0 is above correction_high = 5.0",
    ),
    ("dual clip", "[loss]\ndual_clip = 0.5", "dual_clip = 0.5 would clip tokens on policy"),
    (
        "cispo bounds",
        '[loss]\nmode = "cispo"\nclip_low = 2\nclip_high = 1',
        "clip_low = 2.0 is above clip_high = 1.0",
    ),
    (
        "cispo default bound",
        '[loss]\nmode = "cispo"\nclip_low = 5',
        "clip_low = 5.0 is above clip_high = 4.0 (its default)",
    ),
    (
        "k1 as a loss",
        '[loss]\nkl_coef = 0.1\nkl_estimator = "k1"',
        'kl_estimator = "k1" as a loss term has an expected gradient of 0',
    ),
    (
        "ppo clip",
        '[loss]\nmode = "ppo"\nclip_low = 1',
        "clip_low = 1.0 would clip the ratio at 1 - clip_low",
    ),
    (
        "batch bounds",
        "[backpressure]\nmin_batch_size = 65",
        "min_batch_size = 65 is above max_batch_size = 64",
    ),
    (
        "no turns",
        "[environment]\nmax_turns = 0",
        "max_turns = 0 would end every episode before it starts",
    ),
    ("reward twice", '[reward]\ntype = ["match", "match"]', 'names "match" twice'),
    (
        "condition with both",
        '[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"\nadvantage_mode = "grpo"',
        "and a mode that it replaces",
    ),
    (
        "condition, nearest",
        '[[campaign.conditions]]\nadvantage_mode = "grop"\ntransform_mode = "none"',
        'did you mean "grpo"?',
    ),
    (
        "condition and aggregation",
        '[loss]\naggregation = "sum"\n[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"',
        "contradicts",
    ),
    ("pass@k", "[evaluation]\nk = [1, 8]", "asks for pass@8 of samples = 1"),
    (
        "dr_grpo",
        '[algorithm]\nalgorithm_mode = "dr_grpo"\n[loss]\naggregation = "sum"',
        'contradicts algorithm_mode = "dr_grpo"',
    ),
    (
        "campaign base",
        '[campaign]\n[algorithm]\nalgorithm_mode = "grpo_none"',
        "in a campaign's base would override every condition",
    ),
    (
        "half a condition",
        '[[campaign.conditions]]\nadvantage_mode = "grpo"',
        "number 1 lacks transform_mode",
    ),
    (
        "condition with more",
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\nlrr = 1.0',
        "lrr is not a key of a condition",
    ),
    (
        "twins",
        (
            '[campaign]\nconditions = [{advantage_mode = "a.f", transform_mode = "none"},'
            ' {advantage_mode = "b.f", transform_mode = "none"}]'
        ),
        'are both called "f+none"',
    ),
    ("seed twice", "[campaign]\nseeds = [1, 1]", "[campaign] seeds names 1 twice"),
    ("campaign seed", "[campaign]\nseeds = [-1]", "seeds = [-1] holds a number out of range"),
    ("no seeds", "[campaign]\nseeds = []", "[campaign] seeds = [] is empty"),
    ("empty list of rewards", "[reward]\ntype = []", "[reward] type = [] is empty"),
    ("syntax", "[training\nlr = 1", "is not valid TOML: "),
    ("no quotes", "[model]\nmodel = lab", "(at line 2, column 9); the line is `model = lab`."),
    ("key given again", "[training]\nlr = 1.0\nseed = 1\nlr = 2.0\n", "the line is `lr = 2.0`."),
    ("end of a text", '[model]\nmodel = """lab', "(at end of document)."),
    ("repeated key", "[training]\nlr = 1.0\nlr = 2.0\n", "(at line 3, column"),
]


@pytest.mark.parametrize(
    ("text", "part"), [pytest.param(text, part, id=name) for name, text, part in WRONG]
)
def test_a_wrong_value_gets_one_sentence_that_names_it(text: str, part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(text, Path("run.toml"))
    assert caught.value.exit_code == 2
    matching = [problem for problem in caught.value.problems if part in problem]
    assert len(matching) == 1, caught.value.problems
    assert matching[0].startswith("run.toml")
    assert matching[0].endswith((".", "?")) and "\n" not in matching[0]
    if "[" in part and "number 1" not in part:
        assert len(caught.value.problems) == 1, caught.value.problems


def test_all_problems_of_a_file_come_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(
            '[training]\nlr = "a"\ngrup_size = 3\nkeep_checkpoints = 1\n[los]\n[loss]\ncorrection ='
            ' "tis"',
            Path("run.toml"),
        )
    found = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    assert all(
        part in found for part in ("lr = ", "grup_size", "keep_checkpoints", "[los]", "correction")
    )


def test_a_wrong_value_is_not_reported_again_by_a_rule_about_its_default() -> None:
    """judge_model has the wrong type; that the judge then lacks a model would be a second, false
    complaint.
    """
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml('[reward]\ntype = "judge"\njudge_model = 5')
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("engine", [name for name in builtin_names("engine") if name != "pytorch"])
@pytest.mark.parametrize("kind", ["shannon_entropy", "entropy", "token_entropy"])
def test_shannon_entropy_is_refused_with_every_built_in_engine_but_pytorch(
    engine: str, kind: str
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f'needs .inference. engine = "pytorch", and "{engine}" returns log-probs only',
    ):
        config_from_mapping(
            {"algorithm": {"uncertainty_kind": kind}, "inference": {"engine": engine}}
        )


@pytest.mark.parametrize("backend", ["tinker", "prime_rl", "my_module.my_backend"])
def test_shannon_entropy_is_refused_with_every_backend_but_local(backend: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=f'needs .backend. backend = "local", and "{backend}" returns log-probs only',
    ):
        config_from_mapping(
            {
                "algorithm": {"transform_params": {"uncertainty_kind": "shannon_entropy"}},
                "backend": {"backend": backend},
            }
        )


def test_shannon_entropy_is_allowed_where_logits_are() -> None:
    assert (
        config_from_mapping(
            {"algorithm": {"uncertainty_kind": "shannon"}}
        ).algorithm.uncertainty_kind
        == "shannon_entropy"
    )


def test_files_that_cannot_be_read_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"retrain\.toml does not exist; make one with `retrain init`"
    ):
        load_config(environ={})
    with pytest.raises(ConfigurationError, match=r"absent\.toml does not exist; check the path"):
        load_config("absent.toml", environ={})
    with pytest.raises(ConfigurationError, match="is a folder, and a TOML file is expected"):
        load_config(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes(b'[model]\nmodel = "\xe9"')
    with pytest.raises(ConfigurationError, match=r"latin\.toml is not UTF-8 text \(byte 17\)"):
        load_config("latin.toml", environ={})


def test_a_long_value_is_cut_in_its_sentence() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_mapping({"training": {"lr": "x" * 5000}})
    assert len(str(caught.value)) < 300


def test_an_open_name_may_be_a_plugin_without_being_imported() -> None:
    config = config_from_mapping(
        {
            "algorithm": {"advantage_mode": "no_such_module.f"},
            "reward": {"type": "no_such_module.g"},
        }
    )
    assert config.condition_label == "f+gtpo_sepa"


def test_wrong_options_beyond_number_are_counted_and_not_each_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(rules, "nearest", lambda name, known: compared.append(name))
    with pytest.raises(ConfigurationError) as caught:
        config_from_mapping({"backend": {"options": {f"k{number}": 1 for number in range(5000)}}})
    assert (
        len(caught.value.problems) == 20 and "4,981 more of its names" in caught.value.problems[-1]
    )
    assert compared == [f"k{number}" for number in range(19)]


def test_a_data_source_that_names_what_lies_here_is_answered_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "lines.jsonl").touch()
    for word, place in (("sums", "./sums"), ("lines", "lines.jsonl")):
        with pytest.raises(ConfigurationError, match=f'did you mean "{place}"'):
            config_from_mapping({"data": {"source": word}})
    with pytest.raises(ConfigurationError) as refused:
        config_from_mapping({"data": {"source": "nothing"}})
    assert "did you mean" not in str(refused.value)
