"""`[[data.mix]]`: exact shares, each source's own order, reward and held-out rows, and resume."""

import json
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain import train
from retrain.analysis.integrity import planned_values
from retrain.campaign import plan_campaign
from retrain.campaign.manifest import stored_form
from retrain.cli.main import main
from retrain.config import (
    TrainConfig,
    config_from_mapping,
    dump_toml,
    load_config,
    replaced,
    unused_keys,
)
from retrain.config.load import arms
from retrain.config.moving import value_at
from retrain.config.plan import sources_of
from retrain.data.mixing import MixedChoice, Shares, prompt_choice
from retrain.data.prompts import MixedPrompts, PromptSet, encode_prompts
from retrain.data.sources import ReadResult
from retrain.errors import ConfigurationError
from retrain.explain import explain
from retrain.explain.text import to_text
from retrain.model.text import TextModel
from retrain.model.vocabulary import VocabularyTable
from retrain.plugins import named_code
from retrain.types import Example, Group
from tests.runs import assert_same_run, lines, small
from tests.stops import killed
from tests.tokenizers_for_tests import byte_level

SUMS = {"source": "lab", "name": "sums"}
CHAINS = {"source": "lab", "name": "chains", "difficulty": 2}
MOVING = [
    {**SUMS, "weight": [[0, 1.0], [300, 0.2]]},
    {**CHAINS, "weight": [[0, 0.1], [100, 0.7], [200, 0]]},
    {"source": "gsm8k", "weight": 0.3},
]


def mixed(tables: Sequence[dict[str, Any]], **sections: dict[str, Any]) -> TrainConfig:
    return config_from_mapping({**sections, "data": {**sections.get("data", {}), "mix": tables}})


def check_shares(weights: Sequence[Sequence[float]], counts: Sequence[int]) -> Shares:
    """Take a step of each count; the exact share is computed beside it in fractions."""
    shares = Shares.of(len(weights[0]))
    exact = [Fraction(0)] * len(weights[0])
    for own, count in zip(weights, counts, strict=True):
        after = shares.after(own, count)
        total = sum(map(Fraction, own))
        exact = [have + count * Fraction(w) / total for have, w in zip(exact, own, strict=True)]
        assert sum(after.taken) == sum(shares.taken) + count
        assert all(new >= old for new, old in zip(after.taken, shares.taken, strict=True))
        assert all(abs(n - x) < 1 for n, x in zip(after.taken, exact, strict=True))
        shares = after
    assert [float(n - x) for n, x in zip(shares.taken, exact, strict=True)] == pytest.approx(
        [-owed for owed in shares.owed], abs=1e-9
    )
    return shares


def test_ten_thousand_prompts_have_their_shares_to_the_unit() -> None:
    sources = sources_of(mixed(MOVING))
    counts = [31 + step % 5 for step in range(304)]
    weights = [[value_at(source.weight, step) for source in sources] for step in range(304)]
    assert sum(check_shares(weights, counts).taken) > 10_000
    fixed = check_shares([[2, 1, 1]] * 2500, [4] * 2500)
    assert fixed.taken == (5000, 2500, 2500)


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any),
                st.integers(1, 20),
            ),
            min_size=1,
            max_size=30,
        )
    )
)
def test_shares_hold_whatever_weights_and_batches_do(steps: list[tuple[list[int], int]]) -> None:
    check_shares([weights for weights, _ in steps], [count for _, count in steps])


def text_model() -> TextModel:
    tokenizer = byte_level()
    return TextModel("", tokenizer, VocabularyTable(tokenizer), (tokenizer.eos_token_id,), 10**6)


def prompts_of(sizes: Sequence[int]) -> MixedPrompts:
    sets: list[PromptSet] = []
    text = text_model()
    for source, size in zip(sources_of(mixed(MOVING)), sizes, strict=True):
        rows = [Example(f"{source.task}{i}?", "", source.task, None, f"{i}") for i in range(size)]
        loaded = ReadResult(source.config.data, rows)
        sets.append(encode_prompts(source.config.training, text, loaded))
    return MixedPrompts.of(sets)


def test_a_choice_keeps_shares_and_orders_and_resumes_anywhere() -> None:
    config, prompts = mixed(MOVING), prompts_of([90, 200, 41])
    sources = sources_of(config)
    straight = prompt_choice(config, prompts)
    resumed = ahead = prompt_choice(config, prompts)
    assert isinstance(straight, MixedChoice)
    seen: dict[str, list[str]] = {"sums": [], "chains": [], "gsm8k": []}
    shares, count = Shares.of(3), 40
    for step in range(250):
        indices = straight.indices(step, count, 7)
        assert resumed.indices(step, count, 7) == indices
        batch = straight.take(step, 0, count, 7, indices)
        after = shares.after([value_at(each.weight, step) for each in sources], count)
        quotas = [new - old for new, old in zip(after.taken, shares.taken, strict=True)]
        assert [sum(p.example.task == task for p in batch) for task in seen] == quotas
        for prompt in batch:
            seen[prompt.example.task].append(prompt.example.example_id)
        # Split mode asks for the next step before this one is observed.
        resumed.take(step, 0, count, 7, indices)
        early = resumed.indices(step + 1, count, 7)
        groups = [Group(prompt, slot, []) for slot, prompt in enumerate(batch)]
        for choice in (straight, resumed):
            choice.observe(step, groups)
        assert early == straight.indices(step + 1, count, 7)
        if step % 50 == 3:
            state = json.loads(json.dumps(straight.state_dict()))
            resumed = prompt_choice(config, prompts)
            resumed.load_state_dict(state)
        shares = after
    assert ahead is not resumed
    looked_at = prompts.batch(0, 6, 7)
    assert [prompt.example.task for prompt in looked_at] == [*seen] * 2
    assert [prompt.prompt_id for prompt in looked_at[:3]] == [ids[0] for ids in seen.values()]
    for own, ids in zip(prompts.sets, seen.values(), strict=True):
        order = own.order(0, len(ids), 7)
        assert [own.examples[index].example_id for index in order] == ids


def test_a_steps_prompts_of_a_source_are_spread_over_it() -> None:
    """Else a minibatch would hold one source alone."""
    tables = [{**SUMS, "weight": 3}, CHAINS, {"source": "gsm8k", "weight": 0}]
    choice = prompt_choice(mixed(tables), prompts := prompts_of([8, 8, 8]))
    tasks = [prompts.examples[index].task for index in choice.indices(0, 8, 0) or ()]
    assert tasks == ["sums", "chains", "sums", "sums"] * 2 or tasks.count("chains") == 2
    assert {"sums", "chains"} == set(tasks[:4]) == set(tasks[4:])


GUESS = {
    "name": "guess",
    "environment": {
        "provider": "retrain.environments.lab.NumberGuessing",
        "args": {"largest": 5, "turns": 2},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A straight run on a generator, a file and an environment, and one that was cut and resumed."""
    folder = tmp_path_factory.mktemp("mixture")
    rows = [json.dumps({"prompt": f"1+{i}=?", "answer": f"{1 + i}"}) + "\n" for i in range(9)]
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    tables = [
        {**SUMS, "weight": 2, "reward": {"type": "random", "random_p": 1.0}},
        {"source": str(folder / "rows.jsonl"), "weight": [[0, 2], [3, 4.0]]},
        GUESS,
    ]
    sections: dict[str, Any] = {
        "data": {"source": "math", "mix": tables, "sampler": "drop_solved"},
        "training": {"batch_size": 5, "max_tokens": 12},
        "reward": {"type": "random", "random_p": 0.0},
        "logging": {"tokens_every": 1},
        "evaluation": {"every": 2, "max_examples": 3},
    }
    train(small(folder / "straight", **sections), quiet=True)
    config = small(folder / "cut", **sections)
    train(replaced(config, {"training.max_steps": 2}), quiet=True, skip_parity=True)
    train(replaced(config, {"resume.from": str(folder / "cut")}), quiet=True, skip_parity=True)
    return folder / "straight", folder / "cut"


def test_a_run_judges_each_source_by_its_own_reward(runs: tuple[Path, Path]) -> None:
    steps = [record["by_task"] for record in lines(runs[0] / "metrics.jsonl")]
    shares = Shares.of(3)
    for step, found in enumerate(steps):
        after = shares.after((2, value_at([[0, 2], [3, 4.0]], step), 1), 5)
        quotas = [new - old for new, old in zip(after.taken, shares.taken, strict=True)]
        tasks = ("sums", "rows", "guess")
        assert [found.get(f"prompts/{task}", 0) for task in tasks] == quotas
        assert found["reward/sums"] == found["correct/sums"] == 1
        assert found["reward/rows"] == found["correct/rows"] == 0
        shares = after
    assert any("reward/guess" in found for found in steps)
    prompts = {line["prompt_id"] for line in lines(runs[0] / "emergence/generations.jsonl")}
    assert {name.partition("/")[0] for name in prompts} == {"sums", "rows", "guess"}
    gate = json.loads((runs[0] / "environment.json").read_text(encoding="utf-8"))["parity_gate"]
    assert gate["reference_answers"].startswith("sums not applicable, rows not applicable, guess ")


def test_a_run_evaluates_the_sources_that_have_held_out_rows(runs: tuple[Path, Path]) -> None:
    tasks = [line["task"] for line in lines(runs[0] / "evaluation.jsonl")]
    assert tasks == (["sums"] * 3 + ["guess"] * 3) * 2
    log = (runs[0] / "output.log").read_text(encoding="utf-8")
    assert "The source rows has no held-out rows, so retrain trains on it and" in log
    exported = runs[0].parent / "exported"
    assert main(["export", str(runs[0]), "--output", str(exported)]) == 0
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert '| `data.mix` | `["sums", "rows", "guess"]` |' in card and "data.source" not in card


def test_a_resumed_mixture_has_the_bytes_of_the_straight_run(runs: tuple[Path, Path]) -> None:
    assert_same_run(*runs, steps=4)
    rows, config = runs[1].parent / "rows.jsonl", load_config(runs[1] / "config.toml")
    kept = rows.read_text(encoding="utf-8")
    rows.write_text(kept.replace("1+0", "2+0"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"\[\[data.mix\]\] holds other examples"):
        train(replaced(config, {"resume.from": str(runs[1])}), quiet=True, skip_parity=True)
    rows.write_text(kept, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.faults("kills of a mixture, resumed")
def test_a_killed_mixture_resumes_to_the_same_bytes(
    runs: tuple[Path, Path], tmp_path: Path, kill: int
) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    config = replaced(load_config(runs[0] / "config.toml"), {"logging.log_dir": str(folder)})
    file.write_text(dump_toml(config), encoding="utf-8")
    killed(file, folder, kill % 4, random.Random(kill).uniform(0, 0.3))
    assert killed(file, folder, 99, 240) == 0
    assert_same_run(runs[0], folder, steps=4)


def test_explain_says_the_quotas() -> None:
    config = mixed(
        [SUMS, {**CHAINS, "weight": [[0, 1], [9, 3]], "reward": {"type": "random"}}],
        model={"model": "lab"},
        training={"batch_size": 4, "max_steps": 10},
        backend={"devices": "cpu"},
    )
    seen = explain(config)
    (sums, chains) = seen.to_json()["mix"]
    assert (sums["task"], sums["first_step"], sums["last_step"]) == ("sums", 2, 1)
    assert sums["all_steps"] + chains["all_steps"] == 40 and chains["last_step"] == 3
    assert (
        f"chains: 2 of 4 prompts in the first step, 3 in the last, {chains['all_steps']} in all;"
        " lab, reward random" in to_text(seen)
    )
    assert not seen.refused and not seen.unused


def test_a_campaigns_conditions_and_a_flag_set_the_mixture_whole(tmp_path: Path) -> None:
    condition = {"advantage_mode": "grpo", "transform_mode": "none"}
    conditions = [
        {**condition, "label": "one", "data.mix": [SUMS]},
        {**condition, "label": "both", "mix": [SUMS, CHAINS]},
    ]
    campaign = {"seeds": [1], "max_steps": 1, "conditions": conditions}
    sections = {"model": {"model": "lab"}, "training": {"max_examples": 4}, "campaign": campaign}
    flag = ["--data-mix", '[{source = "lab"}, {source = "gsm8k"}]']
    config = config_from_mapping(sections, flag)
    assert [table["source"] for table in config.data.mix] == ["lab", "gsm8k"]
    one, both = (run.config for run in plan_campaign(config, tmp_path / "new").runs)
    assert [len(sources_of(each)) for each in (one, both)] == [1, 2]
    assert dump_toml(both).count('source = "lab"') == 2
    named = config_from_mapping({**sections, "data": {"source": "gsm8k", "path": "elsewhere"}})
    assert [arm.data.path for arm in arms(named)] == ["", ""]
    assert planned_values(stored_form(named), "both")["data.source"] == "math"


def test_code_in_a_table_is_named_as_code() -> None:
    tables = [{**SUMS, "reward": {"type": "my_reward.score"}}, {"source": "my_data.rows"}]
    assert named_code(mixed(tables)) == [
        '[reward] type = "my_reward.score"',
        '[data] source = "my_data.rows"',
    ]


def test_a_key_is_in_use_if_a_source_reads_it() -> None:
    given = {"data": {"difficulty": 2, "params": {"a": 1}}, "reward": {"random_p": 0.1}}
    unused = unused_keys(mixed([{"source": "lab"}], **{**given, "data": {"difficulty": 2}}))
    assert len(unused) == 1 and "random_p" in unused[0]
    tables = [{"source": "gsm8k", "reward": {"type": "random"}}]
    unused = unused_keys(mixed(tables, data={"difficulty": 2}, reward={"random_p": 0.1}))
    assert len(unused) == 1 and "difficulty" in unused[0]


def test_an_audit_of_a_mixture_asks_for_one_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text('[[data.mix]]\nsource = "lab"\n', encoding="utf-8")
    assert main(["audit", str(tmp_path / "a.toml")]) == 2
    assert "an audit is about one reward" in capsys.readouterr().err
