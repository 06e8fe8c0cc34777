"""The X-ray of an advantage: closed forms, a Monte-Carlo gradient, and what a user sees."""

import json
from collections.abc import Callable
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.episode import (
    ADVANTAGES,
    grpo,
    grpo_std,
    maxrl,
    reinforce,
    reinforce_pp,
    rloo,
)
from retrain.cli.main import main
from retrain.config import config_from_mapping
from retrain.xray import Xray, xray
from retrain.xray.resolve import headline_of, read_xray
from retrain.xray.text import objective_name, sentences

P = np.array([0.01, 0.1, 0.3, 0.5, 0.8, 0.99])


def each(function: Callable[[list[float]], list[float]]) -> Callable[..., list[list[float]]]:
    return lambda groups: [function(rewards) for rewards in groups]


def of(function: Callable[[list[float]], list[float]], group: int = 8) -> Xray:
    return xray(getattr(function, "__name__", "f"), each(function), group)


def pkpo(k: int) -> Callable[[list[float]], list[float]]:
    """PKPO's reward of pass@k, minus its mean over the group (arXiv 2505.15201)."""

    def advantage(rewards: list[float]) -> list[float]:
        n, right = len(rewards), int(sum(rewards))
        fails = comb(n - 1 - right, k - 1) / comb(n - 1, k - 1) if n - 1 - right >= k - 1 else 0.0
        values = [k / n if reward else k / n * (1 - fails) for reward in rewards]
        return [value - sum(values) / n for value in values]

    return advantage


@pytest.mark.parametrize("group", [2, 4, 8, 16])
def test_the_weights_are_the_closed_forms(group: int) -> None:
    assert of(grpo, group).weight(P) == pytest.approx(np.full(6, (group - 1) / group))
    assert of(rloo, group).weight(P) == pytest.approx(np.ones(6))
    assert of(reinforce, group).weight(P) == pytest.approx(np.ones(6))
    # MaxRL's truncation: sum over j < G-1 of (1-p)^j.
    truncated = (1 - (1 - P) ** (group - 1)) / P
    assert of(maxrl, group).weight(P) == pytest.approx(truncated, rel=1e-4)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_passes_at_k_weigh_hard_prompts_by_their_formula(k: int) -> None:
    weight = of(pkpo(k)).weight(P)
    assert weight / weight[0] == pytest.approx((1 - P) ** (k - 1) / (1 - P[0]) ** (k - 1), rel=1e-6)
    assert objective_name(of(pkpo(k))).startswith(f"pass@{k}:")


def test_pass_at_k_of_the_whole_group_has_no_gradient_and_says_so() -> None:
    one = of(pkpo(8))
    assert one.is_flat and "no gradient at any pass rate" in next(sentences(one))


@pytest.mark.filterwarnings("error")
def test_an_advantage_without_any_for_a_single_right_answer_has_a_sentence() -> None:
    one = of(lambda rewards: rewards if sum(rewards) > 1 else [0.0] * len(rewards))
    assert "at p = 5% weighs" in next(sentences(one))


@pytest.mark.parametrize("function", [grpo, grpo_std, maxrl])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_signal_and_noise_are_those_of_sampled_groups(
    function: Callable[[list[float]], list[float]], p: float
) -> None:
    draws = np.random.default_rng(0).random((20_000, 8)) < p
    scores = np.where(draws, 1 - p, -p)
    advantages = np.array([function(row.astype(float).tolist()) for row in draws])
    gradients = (advantages * scores).mean(axis=1)
    one = of(function)
    # grad p with respect to the logit is p (1-p); five standard errors.
    margin = 5 * gradients.std() / np.sqrt(len(gradients))
    assert gradients.mean() == pytest.approx(one.weight([p])[0] * p * (1 - p), abs=margin)
    assert gradients.std() / gradients.mean() == pytest.approx(one.noise([p])[0], rel=0.1)


@given(values=st.lists(st.floats(-3, 3), min_size=18, max_size=18), p=st.floats(0.01, 0.99))
def test_the_objective_is_the_integral_of_the_weight(values: list[float], p: float) -> None:
    one = Xray("any", 8, np.array(values[:9]), np.array(values[9:]))
    step = 1e-5
    slope = np.diff(one.objective([p - step, p + step]))[0] / (2 * step)
    assert slope == pytest.approx(one.weight([p])[0], abs=1e-6)
    assert one.objective([0.0])[0] == 0


def test_an_advantage_over_the_step_sees_prompts_of_every_pass_rate() -> None:
    one = xray("reinforce_pp", reinforce_pp, 8)
    centered = np.concatenate([np.array([1.0] * k + [0.0] * (8 - k)) - k / 8 for k in range(9)])
    assert one.weight(P) == pytest.approx(np.full(6, 7 / 8 / centered.std()))


def test_a_group_of_one_has_nothing_to_compare() -> None:
    with pytest.raises(ValueError):
        of(grpo, 1)


def test_the_command_prints_a_row_for_each_condition(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong_way.py").write_text("def f(rewards):\n    return [-r for r in rewards]\n")
    conditions = [
        f'{{advantage_mode = "{name}", transform_mode = "none"}}' for name in ("grpo", "maxrl")
    ]
    Path("my.toml").write_text(f"[campaign]\nseeds = [1]\nconditions = [{', '.join(conditions)}]\n")
    assert main(["xray", "my.toml", "wrong_way.f", "--group", "4"]) == 0
    text = capsys.readouterr().out
    assert "grpo+none (G = 4)" in text and "maxrl+none: it optimizes log p" in text
    assert "wrong_way.f: it lowers the pass rate of every prompt" in text
    assert main(["xray", "grpo", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["xrays"]
    assert one["weight"] == pytest.approx([(one["group"] - 1) / one["group"]] * len(one["rates"]))


def test_the_page_shows_the_table_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/xray.md").read_text(encoding="utf-8")
    assert main(["xray", *ADVANTAGES, "--group", "8"]) == 0
    assert capsys.readouterr().out.strip() in page


def test_an_algorithms_name_is_xrayed_as_the_file_that_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["dapo", "dr_grpo"]
    files = [f"{Path(__file__).parents[1]}/examples/papers/{name}.toml" for name in names]
    assert main(["xray", *names, "--group", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["xrays"]
    assert main(["xray", *files, "--group", "8", "--json"]) == 0
    by_file = json.loads(capsys.readouterr().out)["xrays"]
    assert [row["name"] for row in rows] == names
    for row, file in zip(rows, by_file, strict=True):
        assert row["weight"] == file["weight"] and row["objective"] == file["objective"]


PLUGIN = """
def printing(rewards):
    print("noise")
    return list(rewards)
def huge(rewards):
    return [1e308 * (reward or -1) for reward in rewards]
def sometimes(rewards):
    return [float("nan") if sum(rewards) == 8 else reward for reward in rewards]
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("xray_plugin.huge", "gave 1e+308; give numbers below"),
        ("xray_plugin.sometimes", "group 8: advantage"),
        ("large.toml", "group_size = 2000 is above"),
        ("spo", 'retrain: [algorithm] advantage_mode = "retrain.assets.papers.spo.Tracked" reads'),
        ("", "TOML files, advantages"),
        ("nothing_here", "nothing_here"),
        ("grpo --group 1", "--group 1 is out of range"),
    ],
)
def test_what_an_xray_cannot_show_is_refused_in_one_sentence(
    arguments: str, sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("xray_plugin.py").write_text(PLUGIN)
    lab = '[model]\nmodel = "lab"\n[data]\nsource = "lab"\n'
    Path("large.toml").write_text(f"{lab}[training]\ngroup_size = 2000\n")
    assert main(["xray", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_what_a_plugin_prints_does_not_break_the_json(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("xray_printing.py").write_text(PLUGIN)
    assert main(["xray", "xray_printing.printing", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["xrays"][0]["group"] == 16 and "noise" in said.err


def test_scheduled_parameters_are_those_of_the_first_step(tmp_path: Path) -> None:
    """No step need have the file's own."""

    def weights(eps: float, **schedule: object) -> str:
        algorithm = {"advantage_mode": "maxrl", "transform_mode": "none"}
        params = algorithm | {"advantage_params": {"eps": eps}}
        return headline_of(config_from_mapping({"algorithm": params, "schedule": schedule}))

    moved = {"algorithm.advantage_params.eps": [[0, 1.0], [9, 2.0]]}
    assert weights(0.1, **moved) == f"{weights(1.0)} at step 0" != f"{weights(0.1)} at step 0"
    assert weights(0.1, **{"loss.kl_coef": [[0, 0.1]]}) == weights(0.1)
    file = tmp_path / "moved.toml"
    file.write_text(
        '[algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "none"\n'
        "advantage_params = {eps = 0.1}\n"
        '[schedule]\n"algorithm.advantage_params.eps" = [[0, 1.0]]\n'
    )
    assert read_xray(str(file))[0].name == "maxrl at step 0"
