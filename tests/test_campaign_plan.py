"""From a campaign's file to its runs: names, folders, what each of them trains with, and what is
refused.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from campaigns import planned_config

from retrain.analysis.power import equivalence_line
from retrain.analysis.verdict import PairedDifferences, TestSettings, conclude
from retrain.campaign import CampaignPlan, plan_campaign
from retrain.campaign.plan import Findings, check
from retrain.config import TrainConfig, config_from_toml, dump_toml, replaced, unused_keys
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError, EnvironmentFailure

FOLDER = Path("logs/campaign_20261121_120000")

TWO_PPO = """
[campaign]
seeds = [1, 2]
max_steps = 7

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
label = "ppo"
loss.mode = "ppo"
sepa = { steps = 100 }
lr = 1e-3
"""


def plan(text: str) -> CampaignPlan:
    return plan_campaign(config_from_toml(text, Path("my/campaign.toml")), FOLDER)


def checked(campaign: TrainConfig) -> Findings:
    return check(plan_campaign(campaign, Path("campaign")))


def test_an_empty_campaign_is_five_conditions_by_eight_seeds_of_500_steps() -> None:
    runs = plan("[campaign]").runs
    assert len(runs) == 40
    assert {run.seed for run in runs} == {42, 101, 202, 303, 404, 505, 606, 707}
    labels = ["grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]
    assert [run.condition for run in runs[:5]] == labels
    assert {run.config.training.max_steps for run in runs} == {500}


def test_every_run_is_named_and_lives_by_its_condition_and_seed() -> None:
    for run in plan("[campaign]").runs:
        assert run.name == f"{run.condition}_s{run.seed}"
        assert run.folder == FOLDER / "runs" / run.name
        assert run.config.training.seed == run.seed
        assert run.config.condition_label == run.condition
        assert run.config.kind == "run"


def test_a_seeds_conditions_start_before_the_next_seed() -> None:
    """What is finished when a campaign is cut are pairs."""
    order = [(1, "grpo+none"), (1, "ppo"), (2, "grpo+none"), (2, "ppo")]
    assert [(run.seed, run.condition) for run in plan(TWO_PPO).runs] == order


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("[campaign]\nmax_steps = 3\n[training]\nmax_steps = 9", 3),
        ("[campaign]\n[training]\nmax_steps = 9", 9),
        ("[campaign]", 500),
    ],
)
def test_the_campaigns_steps_win_over_the_trainings(text: str, steps: int) -> None:
    found = plan(text)
    assert {run.config.training.max_steps for run in found.runs} == {steps} == {found.max_steps}


def test_a_condition_sets_any_key_dotted_as_a_table_or_bare() -> None:
    base, ppo = (run.config for run in plan(TWO_PPO).runs[:2])
    assert (base.loss.mode, base.training.lr) == ("importance_sampling", 4e-5)
    assert (ppo.loss.mode, ppo.sepa.steps, ppo.training.lr) == ("ppo", 100, 1e-3)


def test_conditions_survive_being_stored_and_changed() -> None:
    config = config_from_toml(TWO_PPO)
    assert config_from_toml(dump_toml(config)) == config
    assert replaced(config, {"training.lr": 0.5}).conditions == config.conditions


def test_a_random_reward_is_a_control_arm() -> None:
    control = f'{MODES}label = "control"\nreward.type = "random"'
    runs = plan(f"{TWO_PPO}\n[[campaign.conditions]]\n{control}").runs
    assert [run.config.reward.types for run in runs[:3]] == [["match"], ["match"], ["random"]]


MODES = 'advantage_mode = "grpo"\ntransform_mode = "none"\n'


def two_conditions(first: str, second: str) -> str:
    conditions = "".join(f"[[campaign.conditions]]\n{one}\n" for one in (first, second))
    return f"[campaign]\nseeds = [1]\n{conditions}"


MINE = '[reward]\ntype = "custom"\ncustom_module = "mine"\n'
RANDOM = 'reward.type = "random"'


@pytest.mark.parametrize(
    ("base", "changed", "judges"),
    [
        ('[reward]\ntype = "match"', RANDOM, [("match", ""), ("random", "match")]),
        (MINE, RANDOM, [("custom", ""), ("random", "custom")]),
        (
            MINE + '[evaluation]\nreward = "match"',
            RANDOM,
            [("custom", "match"), ("random", "match")],
        ),
        ("", 'reward.normalize = "hendrycks"', [("match", ""), ("match", "")]),
        ('[reward]\ntype = "random"', 'reward.type = "match"', [("random", ""), ("match", "")]),
        ('[reward]\ntype = ["match", "math"]', RANDOM, [("match + math", ""), ("random", "")]),
    ],
)
def test_a_condition_with_another_reward_is_judged_held_out_by_the_bases(
    base: str, changed: str, judges: list[tuple[str, str]]
) -> None:
    runs = plan(two_conditions(MODES, f'{MODES}label = "other"\n{changed}') + base).runs
    found = [(" + ".join(run.config.reward.types), run.config.evaluation.reward) for run in runs]
    assert found == judges


def test_an_algorithm_replaces_the_modes_of_the_base() -> None:
    pair = '[[campaign.conditions]]\nalgorithm_mode = "grpo_constant"\n'
    run = plan(f'[campaign]\n{pair}[algorithm]\nadvantage_mode = "grpo"').runs[0]
    assert run.name == "grpo_constant_s42"
    assert run.config.loss.aggregation == "constant"
    assert not run.config.is_set("algorithm.advantage_mode")


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ("lr = 1e-3", "lr = 1e-4", ["grpo+none~lr=0.001", "grpo+none~lr=0.0001"]),
        ("", 'loss.mode = "gspo"', ["grpo+none", "grpo+none~mode=gspo"]),
        # What they share tells nothing apart.
        ("lr = 1e-3\nloss.mode = 'ppo'", "lr = 1e-3", ["grpo+none~mode=ppo", "grpo+none"]),
        ("lr = 1e-3\nlabel = 'mine'", "lr = 1e-4", ["mine", "grpo+none~lr=0.0001"]),
        ("", "advantage_mode = 'maxrl'\nlr = 3e-3", ["grpo+none", "maxrl+none~lr=0.003"]),
        ("", "data.params = {n = -3, s = ['a b']}", ["grpo+none", "grpo+none~params=n=-3-s=a-b"]),
    ],
)
def test_conditions_that_differ_in_a_further_key_are_labeled_by_it(
    first: str, second: str, labels: list[str]
) -> None:
    modes = MODES.partition("\n")[2] if "advantage_mode" in second else MODES
    runs = plan(two_conditions(MODES + first, modes + second)).runs
    assert [run.condition for run in runs] == labels and len({run.folder for run in runs}) == 2
    assert [run.config.condition_label for run in runs] == labels


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('loss.mod = "ppo"', "loss.mod is not a key of a condition; did you mean loss.mode?"),
        ('loss.mode = "pp"', 'number 2: [loss] mode = "pp" is not known'),
        ("training.group_size = 1", "number 2: [training] group_size = 1 gives every completion"),
        ("training.seed = 5", "training.seed is not for a condition; [campaign] seeds gives it"),
        ("max_steps = 5", "is not for a condition; all conditions need the same steps"),
        ("squeeze.per_layer = true", "[squeeze] belongs to the whole campaign"),
        ('label = "a/b"', "cannot name a folder"),
        ('label = "grpo+none"', 'numbers 1 and 2 are both called "grpo+none"'),
        ('label = "GRPO+none"', '"grpo+none" and "GRPO+none", so their runs would share folders'),
        ('model = "x"', "model is a key of several sections; write model.model or planning.model"),
    ],
)
def test_a_condition_that_sets_something_wrong_is_refused_with_its_number(
    line: str, sentence: str
) -> None:
    label = "" if "label" in line else 'label = "other"\n'
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(two_conditions(MODES, MODES + label + line))
    assert len(caught.value.problems) == 1 and "number" in caught.value.problems[0]
    assert sentence in caught.value.problems[0]


def test_what_is_wrong_for_every_condition_is_said_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(f"{TWO_PPO}\n[training]\ntop_k = 1")
    assert len(caught.value.problems) == 1 and "number" not in caught.value.problems[0]


def test_a_key_is_unused_only_where_no_condition_uses_it() -> None:
    assert unused_keys(config_from_toml(f"{TWO_PPO}\n[loss]\nclip_low = 0.1")) == [
        'Condition "ppo": [sepa] steps = 100 has no effect: no transform here uses SEPA.'
    ]
    (unused,) = unused_keys(config_from_toml("[campaign]\n[loss]\ndual_clip = 2.0"))
    assert "[loss] dual_clip = 2.0 has no effect" in unused


def section(run: Any, name: str) -> Any:
    return getattr(run.config, name)


def test_trackers_get_name_group_and_tags_and_the_users_stay() -> None:
    text = '[campaign]\n[logging]\nwandb_project = "p"\nwandb_tags = "mine"\n'
    logging = section(plan(text).runs[4], "logging")
    named = ("maxrl+gtpo_sepa_s42", "maxrl+gtpo_sepa")
    assert (logging.wandb_run_name, logging.wandb_group) == named
    assert logging.tags == ["mine", "maxrl+gtpo_sepa", "seed42"]
    assert section(plan(text + 'wandb_group = "g"').runs[0], "logging").wandb_group == "g"
    assert section(plan("[campaign]").runs[0], "logging").wandb_run_name == ""
    # trackio has names and groups, and no tags.
    local = section(plan('[campaign]\n[logging]\ntrackers = ["trackio"]\n').runs[4], "logging")
    assert ((local.wandb_run_name, local.wandb_group), local.tags) == (named, [])


def test_no_two_runs_share_a_folder_of_checkpoints() -> None:
    runs = plan('[campaign]\n[backend]\nadapter_path = "adapters"').runs
    assert {section(run, "backend").adapter_path for run in runs} == {f"adapters/{FOLDER.name}"}
    assert len({run.folder for run in runs}) == 40


def test_a_campaign_evaluates_at_the_end_unless_it_says_no() -> None:
    assert section(plan("[campaign]").runs[0], "evaluation").at_end
    told = "[campaign]\n[evaluation]\nat_end = false"
    assert not section(plan(told).runs[0], "evaluation").at_end


def test_tinker_workers_share_their_locks_and_others_have_none() -> None:
    tinker = plan('[campaign]\n[backend]\nbackend = "tinker"')
    (folder,) = {section(run, "backend").throttle_dir for run in tinker.runs}
    assert folder == str(FOLDER / "tinker_throttle") == str(tinker.throttle_dir)
    assert section(plan("[campaign]").runs[0], "backend").throttle_dir == ""


def test_a_wrong_plugin_is_said_before_any_data_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the data was loaded")

    monkeypatch.setattr("retrain.campaign.plan.load_examples", loaded)
    conditions = [
        {"advantage_mode": name, "transform_mode": "none"} for name in ("grpo", "no_such.plugin")
    ]
    with pytest.raises(ConfigurationError, match=r"no_such\.plugin"):
        checked(planned_config({"seeds": [1, 2], "max_steps": 2, "conditions": conditions}))


@pytest.mark.parametrize(("most", "counted"), [(0, 20), (200, 20), (16, 16)])
def test_the_effect_that_seeds_find_counts_the_problems_that_there_are(
    tmp_path: Path, most: int, counted: int
) -> None:
    for name, rows in (("train", 4), ("test", 20)):
        lines = [f'{{"prompt": "{name} {row}", "answer": "1"}}\n' for row in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = {"source": str(tmp_path / "train.jsonl"), "path": ""}
    held_out = {"source": str(tmp_path / "test.jsonl"), "max_examples": most, "samples": 4}
    asked = planned_config({"seeds": [*range(8)], "max_steps": 2}, data=data, evaluation=held_out)
    found = checked(asked)
    assert f" {counted} held-out problems x 4 samples " in " ".join(found.lines)
    (tmp_path / "test.jsonl").write_text("".join(lines).replace("test 3", "test three"))
    assert checked(asked).heldout_sha256 != found.heldout_sha256
    mix = [{"source": "lab"}, {"source": str(tmp_path)}]
    mixed = planned_config({"seeds": [1], "max_steps": 2}, data={"mix": mix})
    before = checked(mixed).heldout_sha256
    (tmp_path / "test.jsonl").write_text("".join(lines))
    assert before != checked(mixed).heldout_sha256
    assert not any("different held-out problems" in line for line in found.lines)
    modes = {"advantage_mode": "grpo", "transform_mode": "none"}
    both = [modes, modes | {"label": "mixed", "mix": [{"source": "lab"}]}]
    apart = checked(planned_config({"seeds": [1], "max_steps": 2, "conditions": both}))
    assert any("different held-out problems" in line for line in apart.lines)


def test_what_no_run_could_do_is_said_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "served_elsewhere.py").write_text(
        "from retrain.backends.prime_rl.facts import PrimeRLFacts\n"
        "class Elsewhere(PrimeRLFacts):\n"
        "    choices = device_name = half_precision = num_trainable = None\n"
        "    train = logprobs = save_adapter = save = load = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    campaign = planned_config({"seeds": [1, 2], "max_steps": 2})
    ppo = {"backend.backend": "served_elsewhere.Elsewhere", "loss.mode": "ppo"}
    with pytest.raises(ConfigurationError, match=r'\[loss\] mode = "ppo".*own loss settings'):
        checked(replaced(campaign, ppo))
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(EnvironmentFailure, match="needs the Tinker SDK"):
        checked(replaced(campaign, {"backend.backend": "tinker"}))
    # The machines of Ray may have other packages.
    checked(replaced(campaign, {"backend.backend": "tinker", "campaign.launcher": "ray"}))


def test_a_margin_within_which_nothing_can_be_called_equivalent_is_said() -> None:
    asked = Campaign(margin=0.02)
    said = next(equivalence_line(6, 4, asked))
    assert said.endswith("with 6 seeds: 4 comparisons at 0.05 take at least 7.")
    for seeds, comparisons in ((6, 3), (7, 4)):
        assert not [*equivalence_line(seeds, comparisons, asked)]
        alike = [PairedDifferences(dict.fromkeys(range(seeds), 0.0))] * comparisons
        assert {one.verdict for one in conclude(alike, TestSettings(margin=0.02))} == {"equivalent"}
    for silent in (Campaign(), Campaign(margin=0.02, stop="evidence")):
        assert not [*equivalence_line(6, 4, silent)]
    alike = [PairedDifferences(dict.fromkeys(range(6), 0.0))] * 4
    assert {one.verdict for one in conclude(alike, TestSettings(margin=0.02))} == {"inconclusive"}


# -- a grid ----------------------------------------------------------------------------------------

GRID = """
[algorithm]
advantage_mode = "grpo"
transform_mode = "none"

[campaign]
seeds = [1]

[campaign.grid]
lr = [1e-4, 4e-4]
lora.alpha = [8, 16]
"""
LABELED = f'[[campaign.conditions]]\n{MODES}label = "a"\n'.replace("grpo", "rloo")


def test_a_grid_without_conditions_varies_the_files_own_algorithm() -> None:
    runs = plan(GRID).runs
    found = [(run.config.training.lr, run.config.lora.alpha) for run in runs]
    assert found == [(1e-4, 8), (1e-4, 16), (4e-4, 8), (4e-4, 16)]
    assert runs[1].condition == "grpo+none~lr=0.0001~alpha=16"
    assert {run.config.algorithm.advantage_mode for run in runs} == {"grpo"}
    assert all(run.config.campaign is None for run in runs)


def test_a_grid_multiplies_conditions_and_extends_their_labels() -> None:
    labels = plan(f"{GRID}\n{LABELED}").conditions
    assert len(labels) == 4 and labels[0] == "a~lr=0.0001~alpha=8"


def test_a_grid_is_stored_as_it_was_given_and_read_back() -> None:
    config = config_from_toml(GRID)
    again = config_from_toml(dump_toml(config))
    assert again.conditions == config.conditions and again.campaign == config.campaign


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"trainin.lr" = [1]', '"trainin.lr" = [1] names no key'),
        ('"training.lr" = []', '"training.lr" = [] gives no value'),
        ('"evaluation.covariate" = ["auto"]', '"evaluation.covariate" left in 0.10; leave it out'),
        ('"training.seed" = [1, 2]', "names no key that a grid may vary"),
        ('advantage_mode = ["grpo"]', "names no key that a grid may vary"),
        ('"training.lr" = [1, 2, 1.0]', '"training.lr" the value 1.0 twice'),
        (
            "\n".join(f'"training.{key}" = {list(range(2, 40))}' for key in ("lr", "seed", "lora")),
            "54,872 combinations, more than 1,000",
        ),
        ("lr = 1", "a table of lists"),
        ('lr = ["x", 1]', '~lr=x: [training] lr = "x" is a string'),
        ("lr = [1e-4, 1e-4]", "the value 0.0001 twice"),
    ],
)
def test_a_grid_that_varies_nothing_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        plan(f"[campaign]\nseeds = [1]\n[campaign.grid]\n{given}\n")


def test_a_key_of_the_grid_and_of_a_condition_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"which .* number 1 sets too"):
        plan(f"{GRID}\n{LABELED}lr = 1e-3")


def test_a_stored_run_holds_the_paths_that_its_campaign_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f'[lora]\ninit_from = "$SCRATCH/a"\n[campaign]\nseeds = [1]\n{LABELED}'
    monkeypatch.setenv("SCRATCH", "/scratch")
    run = plan(f'{text}"data.path" = "$SCRATCH/b.jsonl"\n').runs[0].config
    monkeypatch.delenv("SCRATCH")
    assert config_from_toml(dump_toml(run)) == run
    assert (run.lora.init_from, run.data.path) == ("/scratch/a", "/scratch/b.jsonl")
