"""Whole runs that a language model judges: what is recorded, exact resume, held-out answers, and
the seeds' own configuration.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from retrain.config import load_config
from retrain.config.overrides import parse_overrides
from retrain.errors import EnvironmentFailure, RunFailed
from retrain.records.run_folder import RunFolder
from tests.judges import Handler, failing, first, saying, serving
from tests.runs import lines, small, small_run


def arbitrary(handler: Handler) -> None:
    """A verdict that depends on the completion alone and is right about half of the time."""
    handler.reply("yes" if sum(map(ord, handler.prompt)) % 2 else "no", cost=0.25)


def judged(url: str, **more: Any) -> dict[str, Any]:
    return {"reward": {"type": "judge", "judge_model": "judge-1", "judge_base_url": url} | more}


def test_a_run_records_what_its_judge_took_and_resumes_with_the_same_verdicts(
    tmp_path: Path,
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    with serving(arbitrary) as server:
        small_run(small(straight, **judged(server.url)), quiet=True)
        asked = len(server.requests)
        small_run(
            small(resumed, **judged(server.url), training={"max_steps": 3, "save_every": 2}),
            quiet=True,
        )
    records = lines(straight / "metrics.jsonl")
    assert asked == 1 + sum(
        record["judge_requests"] for record in records
    )  # the probe is none of a step's
    for record in records:
        assert record["judge_requests"] + record["judge_cached"] == 8
        assert record["reward_could_not_judge"] == 0
        assert record["judge_prompt_tokens"] == 100 * record["judge_requests"]
        assert (
            record["judge_cost"] == pytest.approx(0.25 * record["judge_requests"])
            or record["judge_cost"] is None
        )
    assert 0 < sum(record["mean_reward"] for record in records) < 4
    cut_back(resumed)
    with serving(
        first(saying("yes"), 1, saying("no"))
    ) as server:  # a judge that has changed its mind
        small_run(
            small(
                resumed,
                **judged(server.url),
                resume={"from": str(resumed)},
                training={"max_steps": 3, "save_every": 2},
            ),
            quiet=True,
        )
        assert len(server.requests) == 1  # the probe
    (again,) = [record for record in lines(resumed / "metrics.jsonl") if record["step"] == 2]
    assert (again["judge_requests"], again["judge_cached"], again["mean_reward"]) == (
        0,
        8,
        records[2]["mean_reward"],
    )
    generations = [
        lines(folder / "emergence" / "generations.jsonl")[:24] for folder in (straight, resumed)
    ]
    assert generations[0] == generations[1]


def cut_back(folder: Path) -> None:
    """Lose the last checkpoint, as a kill before it would."""
    shutil.rmtree(RunFolder(folder).checkpoints / "step_000003")
    shutil.rmtree(RunFolder(folder).checkpoints / "final")


def test_a_judge_that_fails_stops_the_run_with_its_reason_and_no_zero(tmp_path: Path) -> None:
    forbidden = serving(first(saying("yes"), 1, failing(403, "your account is empty")))
    with (
        forbidden as server,
        pytest.raises(RunFailed, match=r"verdict.*403 Forbidden: your account is empty"),
    ):
        small_run(small(tmp_path, **judged(server.url)), quiet=True)
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert (record["reward_could_not_judge"], record["num_datums"]) == (8, 0)
    assert record["mean_reward"] is record["correct_rate"] is None
    generations = lines(tmp_path / "emergence" / "generations.jsonl")
    assert {line["outcome"] for line in generations} == {"could_not_judge"}


def test_a_judge_that_cannot_be_asked_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with (
        serving(failing(404, "no such model")) as server,
        pytest.raises(EnvironmentFailure, match="404 Not Found: no such model"),
    ):
        small_run(small(tmp_path, **judged(server.url)), quiet=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_held_out_answers_alone_may_be_judged(tmp_path: Path) -> None:
    with serving(arbitrary) as server:
        config = small(
            tmp_path,
            reward={"judge_model": "judge-1", "judge_base_url": server.url},
            evaluation={"reward": "judge", "at_end": True, "max_examples": 4},
            training={"max_steps": 1},
        )
        small_run(config, quiet=True)
        assert 1 < len(server.requests) <= 5
    records = lines(tmp_path / "evaluation.jsonl")
    assert [line["samples"] for line in records] == [1] * 4
    asked = len(server.requests) - 1  # the probe is no problem's
    assert sum(line["judge_requests"] or 0 for line in records) == asked
    assert sum(line["judge_prompt_tokens"] or 0 for line in records) == 100 * asked
    assert lines(tmp_path / "metrics.jsonl")[0]["judge_requests"] is None  # a random reward trained


SEED_BLOCK = """
[reward]
type = "judge"
judge_model = "gpt-4o-mini"
"""


def test_the_judge_block_of_the_seeds_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the hosted service, which is named outside of the file."""
    file = tmp_path / "judge.toml"
    file.write_text(SEED_BLOCK + '[model]\nmodel = "lab"\nlora_rank = 4\n[data]\nsource = "lab"\n')
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-0123456789abcdef")
    with serving(arbitrary) as server:
        tiny = "--batch-size 2 --group-size 4 --max-tokens 24 --max-steps 1 --devices cpu"
        flags = f"--reward-judge-base-url={server.url} --log-dir={tmp_path / 'run'} {tiny}".split()
        small_run(load_config(file, parse_overrides(flags)), quiet=True)
        assert server.requests[1][2]["model"] == "gpt-4o-mini"
    written = [path for path in (tmp_path / "run").glob("*.*") if path.is_file()]
    assert not any("sk-test" in path.read_text() for path in written)
