"""What plugins of credit read of a step: each field is what the step had, and the form that takes
all groups at once.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.advantages import AdvantageContext, StepAdvantageContext
from retrain.advantages.pipeline import CreditPipeline
from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping, replaced
from retrain.errors import ConfigurationError
from retrain.records.token_table import read_tokens
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Score,
    Scored,
    Trajectory,
    Turn,
)
from tests.runs import lines, small, small_run, timeless

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"


pytestmark = pytest.mark.usefixtures("here")


def config(**algorithm: Any) -> TrainConfig:
    return config_from_mapping({"algorithm": {"transform_mode": "none", **algorithm}})


def pipeline(source: str, name: str = "f") -> CreditPipeline:
    sys.modules.pop("plug", None)
    Path("plug.py").write_text(source)
    return CreditPipeline(config(advantage_mode=f"plug.{name}"), lambda ids: [""] * len(ids))


def dialogue(sample: int, lengths: list[int], reward: float, parts: tuple[float, ...]) -> Scored:
    turns = []
    for length in lengths:
        ids, logprobs = np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32)
        turns.append(Turn(Completion(0, sample, ids, logprobs, None, FinishReason.STOP)))
    rewards = tuple(reward / len(lengths) for _ in lengths)
    score = Score(Outcome.RIGHT, reward, turn_rewards=rewards, parts=parts)
    return Scored(Trajectory(tuple(turns), cut=sample == 1), f"text {sample}", score)


def step() -> list[Group]:
    prompts = [
        Prompt(Example(f"{n}?", "", example_id=f"p{n}"), "", np.ones(1, np.int32)) for n in range(2)
    ]
    first = [dialogue(0, [3, 2], 3.0, (1.0, 2.0)), dialogue(1, [4], 0.0, (0.0, 0.0))]
    second = [dialogue(0, [1], 1.0, (1.0, 0.0)), dialogue(1, [2, 2, 1], 2.0, (0.0, 2.0))]
    return [Group(prompts[0], 0, first), Group(prompts[1], 1, second)]


RECORDER = """
SEEN = []

def f(ctx):
    SEEN.append((ctx.step, ctx.prompt_id, ctx.texts, ctx.token_ids, ctx.finish_reasons,
                 ctx.reward_parts, ctx.rewards, ctx.turn_spans, ctx.turn_rewards))
    return [0.0] * len(ctx.rewards)

def whole(ctx):
    from retrain.advantages import AlgorithmOutput
    for group in ctx.groups:
        f(group)
    return AlgorithmOutput(ctx.logprobs)
"""


@pytest.mark.parametrize(
    "modes", [{"advantage_mode": "plug.f"}, {"algorithm_mode": "plug.whole"}], ids=str
)
def test_a_plugin_of_a_run_reads_what_the_step_had(modes: dict[str, str], tmp_path: Path) -> None:
    Path("plug.py").write_text(RECORDER)
    settings: dict[str, Any] = {
        "algorithm": modes,
        "reward": {"type": ["random", "match"], "weights": [1.0, 0.5]},
        "training": {"max_steps": 1},
        "logging": {"tokens_every": 1},
    }
    run = small_run(small(tmp_path / "run", **settings), quiet=True)
    seen = [one for one in sys.modules["plug"].SEEN if not one[1].startswith("made-up")]
    assert len(seen) == 2
    written = lines(run.folder / "emergence" / "generations.jsonl")
    table = read_tokens(next((run.folder / "tokens").iterdir()))
    tokens = np.split(table.token_ids, table.offsets[1:-1])
    for place, one in enumerate(seen):
        number, prompt, texts, ids, reasons, parts, rewards, spans, turns = one
        own = slice(4 * place, 4 * place + 4)
        of_prompt = [line for line in written if line["prompt_id"] == prompt]
        of_prompt.sort(key=lambda line: line["sample"])
        assert number == 0 and texts == [line["completion"] for line in of_prompt]
        assert rewards == [line["reward"] for line in of_prompt]
        assert reasons == [line["finish_reason"] for line in of_prompt]
        assert ids == [row.tolist() for row in tokens[own]]
        assert [first + 0.5 * second for first, second in parts] == rewards
        assert spans == [[(0, len(row))] for row in ids] and turns == [()] * 4


def test_turns_lie_end_to_end_with_their_rewards() -> None:
    group = step()[0]
    context = AdvantageContext(group.rewards, [5, 4], 0, 0, source=group)
    assert context.turn_spans == [[(0, 3), (3, 5)], [(0, 4)]]
    assert context.turn_rewards == [(1.5, 1.5), (0.0,)]
    assert context.finish_reasons == ["stop", "length"]
    assert context.example is group.prompt.example


# -- all groups at once ----------------------------------------------------------------------------

BATCH = """
def f({argument}):
    groups = {groups}
    mean = sum(map(sum, groups)) / sum(map(len, groups))
    return [[reward - mean for reward in group] for group in groups]

f.step_level = True
"""


@pytest.mark.parametrize(
    ("argument", "groups"), [("groups", "groups"), ("ctx", "[g.rewards for g in ctx.groups]")]
)
def test_a_step_level_advantage_takes_all_groups(argument: str, groups: str) -> None:
    credit = pipeline(BATCH.format(argument=argument, groups=groups)).assign(step(), 0, 0.0)
    assert [group.advantages for group in credit.groups] == [[1.5, -1.5], [-0.5, 0.5]]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [[0.0]]", 'advantage "plug.f" has 1 groups, it must have 2'),
        ("return None", "gave NoneType, it must give a list of 2 groups"),
        ("return [[0.0]] * 2", "group 0: .* shape \\(1,\\), it must give 3 numbers"),
    ],
)
def test_a_wrong_shape_is_named_before_the_first_step(body: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        pipeline(f"def f(groups):\n    {body}\n\nf.step_level = True\n")


def test_the_documents_gdpo_is_the_papers_formula() -> None:
    (source,) = re.findall(r"```python\n((?:(?!```).)*def gdpo.*?)```", PAGE.read_text(), re.DOTALL)
    made = pipeline(source, "gdpo")
    assert made.notes == []
    credit = made.assign(step(), 0, 0.0)
    # Two rewards of two completions: each is 1 or -1 within its group.
    sums = [2.0, -2.0, 0.0, 0.0]
    expected = np.array(sums) / np.std(sums)
    given = [value for group in credit.groups for value in group.advantages]
    assert given == pytest.approx(expected.tolist(), abs=1e-5)


# -- what is kept between steps --------------------------------------------------------------------

KEEPS = """
class F:
    def __init__(self):
        self.seen = {{}}

    def __call__(self, ctx):
        before = self.seen.get(ctx.prompt_id, 0.5)
        self.seen[ctx.prompt_id] = 0.5 * before + 0.5 * sum(ctx.rewards) / len(ctx.rewards)
        return [reward - before for reward in ctx.rewards]

    {state}
"""
STATE = "def state(self): return self.seen\n    def load(self, state): self.seen = {}"


def test_a_run_with_a_kept_baseline_resumes_as_the_straight_one(tmp_path: Path) -> None:
    Path("plug.py").write_text(KEEPS.format(state=STATE.format("state")))
    settings: dict[str, Any] = {
        "algorithm": {"advantage_mode": "plug.F"},
        "training": {"max_steps": 3, "max_examples": 3, "max_tokens": 8, "save_every": 1},
    }
    straight = small_run(small(tmp_path / "straight", **settings), quiet=True)
    config = small(tmp_path / "cut", **settings)
    small_run(replaced(config, {"training.max_steps": 2}), quiet=True)
    again = small_run(replaced(config, {"resume.from": str(tmp_path / "cut")}), quiet=True)
    assert timeless(straight.folder / "metrics.jsonl") == timeless(again.folder / "metrics.jsonl")
    kept = [
        json.loads((run.folder / "trainer_state.json").read_text())["credit"]
        for run in (straight, again)
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 3


@pytest.mark.parametrize("state", ["pass", STATE.format("{}")])
def test_an_advantage_that_is_not_restored_is_refused(state: str) -> None:
    with pytest.raises(ConfigurationError, match="does not restore"):
        pipeline(KEEPS.format(state=state), "F")


def test_an_interrupted_step_is_taken_again_with_what_was_kept_before_it() -> None:
    made = pipeline(KEEPS.format(state=STATE.format("state")), "F")
    assert made.state_dict(0) == {}
    made.assign(step(), 0, 0.0)
    assert made.state_dict(0) == {} and made.state_dict(1) == {"p0": 1.0, "p1": 1.0}


# -- made-up steps ---------------------------------------------------------------------------------

READS = "def f(ctx):\n    ctx.{name}\n    mean = sum(ctx.rewards) / len(ctx.rewards)\n"
READS += "    return [reward - mean for reward in ctx.rewards]\n"


def test_an_advantage_that_reads_examples_is_not_tried_and_says_so() -> None:
    (note,) = pipeline(READS.format(name="example.info['level']")).notes
    assert "reads `example`, so retrain could not try it" in note
    assert pipeline(READS.format(name="texts")).notes == []


def test_an_xray_reads_the_form_of_a_step_and_refuses_what_reads_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("plug.py").write_text(
        BATCH.format(argument="groups", groups="groups")
        + READS.format(name="texts").replace("def f", "def reads")
    )
    assert main(["xray", "plug.f"]) == 0
    assert "plug.f" in capsys.readouterr().out
    assert main(["xray", "plug.reads"]) == 2
    assert "reads `texts`, and an X-ray knows only the rewards" in capsys.readouterr().err


def test_the_context_of_a_step_has_its_rewards() -> None:
    groups = [AdvantageContext([1.0], [3], 7, 0), AdvantageContext([0.0, 2.0], [1, 1], 7, 1)]
    assert StepAdvantageContext(groups, 7).rewards == [[1.0], [0.0, 2.0]]
