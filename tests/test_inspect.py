"""`retrain inspect`: the credit of single tokens, stored and under other transforms, in a terminal
that model text cannot touch.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from campaigns import write_run
from rich.console import Console
from runs import small

from retrain.analysis.runs import StoredRun
from retrain.cli.main import main
from retrain.inspect import Quantity
from retrain.inspect.credit import StepCredit, agreement, read_step, stored_steps
from retrain.inspect.shading import LEVELS, levels
from retrain.inspect.terminal import show, token_lines
from retrain.records.run_folder import RunFolder
from retrain.records.terminal import visible, without_escapes
from retrain.records.token_table import TokenTable, read_tokens, write_tokens
from tests.runs import small_run
from tests.sentence_encoder import Counter

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder = tmp_path_factory.mktemp("logs") / "run"
    config = small(
        folder,
        algorithm={"transform_mode": "gtpo_sepa"},
        sepa={"steps": 2, "delay_steps": 0},
        training={"max_steps": 2, "batch_size": 3},
        logging={"tokens_every": 1, "generations_per_step": 12},
    )
    return StoredRun(small_run(config, quiet=True).folder)


def printed(credit: StepCredit, *, table: bool = False, by: Quantity = Quantity.ADVANTAGE) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=120)
    show(credit, credit.of_slot(credit.liveliest_slot()), by, console, table=table)
    return out.getvalue()


@pytest.mark.parametrize("name", ["gtpo_sepa", "maxrl+gtpo_sepa"])
def test_the_runs_own_transform_computed_again_gives_what_was_trained_on(
    run: StoredRun, name: str
) -> None:
    for step in (0, 1):
        credit = read_step(run, step, [name])
        stored, computed = credit.stages.values()
        assert list(stored) == list(computed)
        assert credit.labels == ["maxrl+gtpo_sepa", "maxrl+gtpo_sepa (computed)"]
        for stage in stored:
            np.testing.assert_array_equal(stored[stage], computed[stage])


def test_scheduled_keys_are_those_of_the_step(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        algorithm={"transform_mode": "gtpo", "advantage_params": {"eps": 1.0}},
        schedule={
            "gtpo.beta": [[0, 0.1], [1, 0.9]],
            "algorithm.advantage_params.eps": [[0, 0.1], [1, 1e-3]],
        },
        training={"max_steps": 2},
        logging={"tokens_every": 1},
    )
    moving = StoredRun(small_run(config, quiet=True).folder)
    stored, computed = read_step(moving, 1, ["gtpo"]).stages.values()
    np.testing.assert_array_equal(stored["gtpo"], computed["gtpo"])
    own = read_step(moving, 1, ["maxrl+gtpo"]).stages.values()
    np.testing.assert_array_equal(*(stages["gtpo"] for stages in own))
    # Another advantage has none of the parameters that the schedule moves.
    assert read_step(moving, 1, ["rloo+gtpo"]).labels == ["maxrl+gtpo", "rloo+gtpo"]


def test_an_advantage_that_keeps_something_begins_anew_and_says_so(
    run: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_advantage.py").write_text(
        "class Last:\n"
        "    last = 0.0\n"
        "    def __call__(self, rewards):\n"
        "        before, self.last = self.last, rewards[0]\n"
        "        return [reward - before for reward in rewards]\n"
        "    def state(self): return {'last': self.last}\n"
        "    def load(self, state): self.last = state['last']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = [read_step(run, step, ["kept_advantage.Last+none"], trust=True).notes for step in (0, 1)]
    assert not said[0] and "its credit is as if step 1 were its first" in said[1][0]


def test_both_planning_detectors_are_shown_side_by_side(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked: list[str] = []

    def load(name: str) -> Counter:
        asked.append(name)
        return Counter()

    monkeypatch.setattr("retrain.inspect.credit.load_sentence_encoder", load)
    credit = read_step(run, 1, detectors=True, planning_model="a folder")
    assert asked == ["a folder"] and list(credit.detectors) == ["regex", "semantic"]
    np.testing.assert_array_equal(credit.detectors["regex"], credit.planning)
    assert not np.array_equal(*credit.detectors.values())
    (note,) = credit.notes
    both = float((credit.detectors["regex"] & credit.detectors["semantic"]).mean())
    assert f"both {both:.1%}" in note and "kappa" in note
    head = next(line for line in printed(credit, table=True).splitlines() if "surprisal" in line)
    assert head.split()[2:5] == ["regex", "semantic", "surprisal"]
    assert main(["inspect", str(run.path), "--detectors", "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["completions"]
    assert len(first["detectors"]["semantic"]) == len(first["token_ids"])


def test_kappa_is_the_agreement_beyond_chance() -> None:
    one = np.array([1, 1, 0, 0, 0, 0, 0, 0, 0, 0], bool)
    two = np.array([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], bool)
    none = one & ~one
    for a, b, said in (
        (one, two, "agree on 80.0% of the tokens (Cohen's kappa 0.37)"),  # (0.8 - 0.68) / 0.32
        (one, one, "kappa 1.00"),
        (none, none, "nothing to tell apart"),
        (one[:0], one[:0], "no tokens"),
    ):
        assert said in agreement({"a": a, "b": b})


def test_completions_that_the_loss_leaves_out_are_left_out_again(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        algorithm={"transform_mode": "gtpo", "surprisal_mask_rho": 0.3},
        loss={"mask_truncated": True},
        training={"max_steps": 1, "batch_size": 3, "max_tokens": 56},
        logging={"tokens_every": 1},
    )
    credit = read_step(StoredRun(small_run(config, quiet=True).folder), 0, ["gtpo"])
    assert credit.table.truncated is not None and 0 < credit.table.truncated.sum() < 12
    np.testing.assert_array_equal(*credit.finals().values())


def test_another_transform_changes_what_it_is_about_and_nothing_else(run: StoredRun) -> None:
    credit = read_step(run, 0, ["hicra", "none"])
    finals = credit.finals()
    assert credit.planning is not None and credit.planning.any() and not credit.planning.all()
    changed = finals["maxrl+hicra"] != finals["maxrl+none"]
    np.testing.assert_array_equal(changed, credit.planning & (finals["maxrl+none"] != 0))
    np.testing.assert_array_equal(finals["maxrl+none"], credit.stages["maxrl+gtpo_sepa"]["episode"])


def test_the_texts_are_those_of_the_completions(run: StoredRun) -> None:
    credit = read_step(run, 1)
    generations = map(json.loads, run.folder.generations.read_text().splitlines())
    written = {line["completion"] for line in generations if line["step"] == 1}
    for number in range(len(credit.table.slot)):
        completion = credit.completion(number)
        text = "".join(completion.pieces)
        assert (text if completion.truncated else text.removesuffix("<|im_end|>")) in written
        advantages = completion.advantages(credit.labels[0])
        assert len(completion.pieces) == len(completion.surprisals) == len(advantages)
    prompt = credit.prompt(0)
    assert prompt is not None and prompt.startswith("<|im_start|>user") and "=?" in prompt


def test_without_color_there_is_a_line_for_each_token(
    run: StoredRun, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    chosen = ["--prompt", "1", "--sample", "2", "--against", "gtpo_hicra"]
    assert main(["inspect", str(run.path), *chosen]) == 0
    out = capsys.readouterr().out
    (head,) = [line for line in out.splitlines() if line.startswith("token ")]
    credit = read_step(run)
    (number,) = [n for n in credit.of_slot(1) if credit.table.sample[n] == 2]
    ends = "log-ratio maxrl+gtpo_sepa maxrl+gtpo_hicra change by maxrl+gtpo_hicra"
    assert " ".join(head.split()).endswith(ends)
    assert len(out.split(head)[1].strip().splitlines()) == len(credit.completion(number).pieces)


def test_long_names_of_conditions_are_letters_where_the_terminal_is_narrow(run: StoredRun) -> None:
    credit = read_step(run, 1, ["gtpo_hicra"])
    completion = credit.completion(credit.of_slot(credit.liveliest_slot())[0])
    legend, head, *rows = token_lines(completion, range(5), width=80)
    assert legend == "A: maxrl+gtpo_sepa; B: maxrl+gtpo_hicra"
    assert head.split()[-3:] == ["A", "B", "B-A"]
    wide = token_lines(completion, range(5), width=200)
    assert max(map(len, rows)) <= 80 < max(map(len, wide))
    assert [row.split()[-3:] for row in rows] == [row.split()[-3:] for row in wide[1:]]


def test_in_color_the_conditions_stand_side_by_side(run: StoredRun) -> None:
    out = printed(read_step(run, 1, ["gtpo_hicra"]))
    assert any(
        "maxrl+gtpo_sepa" in line and "maxrl+gtpo_hicra" in line for line in out.splitlines()
    )
    assert "48;2;" in out and "\x1b[1;4" in out  # a background, and a planning phrase
    assert "a token's shade is its surprisal" in printed(read_step(run, 1), by=Quantity.SURPRISAL)


def test_json_holds_every_token(run: StoredRun, capsys: Captured) -> None:
    assert main(["inspect", str(run.path), "--step", "0", "--against", "gtpo", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 0 and result["conditions"] == ["maxrl+gtpo_sepa", "maxrl+gtpo"]
    named = ("token_ids", "text", "surprisal", "entropy", "planning")
    for completion in result["completions"]:
        columns = [completion[name] for name in named]
        for stages in completion["advantages"].values():
            columns += stages.values()
        assert len({*map(len, columns)}) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "7"], "the stored steps are 0, 1"),
        (["--prompt", "9"], "its prompts are 0, 1, 2"),
        (["--prompt", "0", "--sample", "9"], "its samples are 0, 1, 2, 3"),
        (["--against", "gtpo_nonsense"], "gtpo_nonsense"),
        (["--against", "entropy_mask"], "surprisal_mask_rho"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    run: StoredRun, arguments: list[str], said: str, capsys: Captured
) -> None:
    assert main(["inspect", str(run.path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_first_and_the_last_step_of_every_run_can_be_inspected(
    tmp_path: Path, capsys: Captured
) -> None:
    run = small_run(small(tmp_path / "run", training={"max_steps": 3}), quiet=True).folder
    assert main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    assert "Step 2, prompt" in said and "log-ratio" not in said
    assert stored_steps(RunFolder(run)) == [0, 2]


def test_a_run_without_tokens_names_the_key(tmp_path: Path, capsys: Captured) -> None:
    assert main(["inspect", str(write_run(tmp_path / "run", 1))]) == 2
    assert "--tokens-every 1" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2


def test_a_run_without_sepa_says_which_lambda_stands_in(run: StoredRun, tmp_path: Path) -> None:
    copied = StoredRun(Path(shutil.copytree(run.path, tmp_path / "run")))
    text = copied.folder.metrics.read_text().splitlines()
    copied.folder.metrics.write_text(
        "".join(json.dumps(json.loads(line) | {"sepa_lambda": None}) + "\n" for line in text)
    )
    (note,) = read_step(copied, 1, ["gtpo_sepa"]).notes
    assert "lambda is 0.5" in note
    assert not read_step(run, 1, ["gtpo_sepa"]).notes


def test_a_file_of_an_earlier_version_is_shown_and_not_computed_on(
    run: StoredRun, tmp_path: Path, capsys: Captured
) -> None:
    copied = StoredRun(Path(shutil.copytree(run.path, tmp_path / "run")))
    path = copied.folder.step_tokens(1)
    older = replace(
        read_tokens(path),
        rewards=None,
        truncated=None,
        log_ratios=None,
        prompt_offsets=None,
        prompt_token_ids=None,
    )
    write_tokens(path, older, 1)
    assert "(not stored)" in printed(read_step(copied, 1))
    assert main(["inspect", str(copied.path), "--against", "gtpo"]) == 2
    assert "did not store the rewards" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure(
    run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(StringIO):
        def write(self, text: str) -> int:
            if text:
                raise BrokenPipeError
            return 0

    monkeypatch.setattr("sys.stdout", Gone())
    assert main(["inspect", str(run.path)]) == 0


# -- what a model wrote ----------------------------------------------------------------------------

HOSTILE = [
    *("a", "\x1b", "[31", "m", "[bold]x[/bold]", "\u202eevil", "\u2028next\u2029\x85", "\x9b2J"),
    *("\n", "", "\x1b]0;t", "itle\x07", "end"),
]


class Written:
    """Texts as they are, in place of a vocabulary."""

    def of(self, token_ids: object) -> list[str]:
        return HOSTILE


def hostile() -> StepCredit:
    count = len(HOSTILE)
    advantages = np.linspace(-1, 1, count).astype(np.float32)
    table = TokenTable(
        offsets=np.array([0, count]),
        slot=np.zeros(1, np.int32),
        sample=np.zeros(1, np.int32),
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        entropies=None,
        mask=None,
        advantages={"episode": advantages},
        prompt_offsets=np.array([0, count]),
        prompt_token_ids=np.arange(count, dtype=np.int32),
    )
    return StepCredit(0, {"maxrl+none": table.advantages}, table, None, Written(), ())  # type: ignore[arg-type]


@pytest.mark.parametrize("table", [True, False])
def test_model_text_is_inert_in_a_terminal(table: bool) -> None:
    out = printed(hostile(), table=table)
    ours = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert not set("\x1b\x9b\x07\u202e\u2028\u2029\x85") & set(ours)
    assert "<U+2028>next<U+2029>" in ours and "<U+202E>evil" in ours
    assert "\x1b[31m" not in out and "[bold]x[/bold]" in ours
    assert "itle" not in ours.partition("Sample")[2]


def test_an_escape_sequence_is_dropped_however_it_is_cut_into_tokens() -> None:
    text = "one\x1b[1;31mtwo\x1b]8;;http://x\x1b\\three"
    for size in range(1, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        kept = without_escapes(pieces)
        assert len(kept) == len(pieces) and "".join(kept) == "onetwothree"


def test_on_a_page_what_acts_unseen_is_written_out() -> None:
    assert (
        visible("a\x1b[0m\x00\x7f\x9b\u202e\ud800\n\tb") == "a␛[0m␀␡<U+009B><U+202E><U+D800>\n\tb"
    )


def test_a_shade_has_the_sign_of_its_value() -> None:
    values = np.array([-9.0, -1.0, -1e-9, 0.0, 1e-9, 0.5, 1.0, np.nan])
    assert levels(values[:-1], 1.0, 7) == [-LEVELS, -LEVELS, -1, 0, 1, 3, LEVELS]
    assert levels(None, 1.0, 3) == [0, 0, 0]


def test_the_token_file_holds_rewards_prompts_and_ends(run: StoredRun) -> None:
    table = read_tokens(RunFolder(run.path).step_tokens(0))
    assert table.rewards is not None and table.truncated is not None
    assert table.prompt_offsets is not None and len(table.prompt_offsets) == 4
    assert len(table.rewards) == len(table.truncated) == len(table.slot) == 12
    generations = [json.loads(line) for line in run.folder.generations.read_text().splitlines()]
    prompt = generations[0]["prompt_id"]
    first = [line for line in generations if line["step"] == 0 and line["prompt_id"] == prompt]
    stored = dict(zip(table.sample[:4].tolist(), table.rewards[:4].tolist(), strict=True))
    assert {line["sample"]: line["reward"] for line in first}.items() <= stored.items()


def test_the_log_ratios_are_those_of_the_policy_that_sampled(run: StoredRun) -> None:
    """Before the step engine and learner agree; a completion that was not trained on has none."""
    for step, line in enumerate(run.folder.metrics.read_text().splitlines()):
        credit = read_step(run, step)
        finals, table = credit.finals()[credit.labels[0]], credit.table
        assert table.log_ratios is not None
        trained = ~np.isnan(table.log_ratios)
        assert trained.any() and np.abs(table.log_ratios[trained]).max() < 1e-4
        assert not finals[~trained].any()
        ratios = [credit.completion(number).log_ratios for number in range(len(table.slot))]
        assert sum(ratio is not None for ratio in ratios) == json.loads(line)["num_datums"]
