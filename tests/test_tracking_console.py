"""The screen: the lines of the documentation, and text of a model that stays text."""

import errno
import io
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.errors import EnvironmentFailure
from retrain.records.disk import writing_to
from retrain.records.entries import EvaluationRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.redact import Redactor
from retrain.records.summary import RunSummary
from retrain.records.terminal import encodable, one_line
from retrain.run.dialogues import counting
from retrain.tracking.base import GroupScore, GroupScores, StartEvent, Verbosity
from retrain.tracking.console import Console
from retrain.tracking.lines import evaluation_line, group_lines, step_line, summary_lines
from retrain.types import LogLine

STEP = StepRecord(
    step=0, condition="maxrl+gtpo_sepa", loss=-0.0012, mean_reward=0.1875, correct_rate=0.1875,
    num_datums=16, batch_size=4,
    group_size=8, sepa_lambda=0.0, step_time_s=45.24,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def without_codes(out: io.StringIO) -> str:
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    return re.sub(r" *\d+/50 [^\r\n]* ETA [^\r\n]*\n?|\r", "", shown)


def evaluation(step: int, *problems: EvaluationRecord) -> Evaluation:
    return Evaluation(step, problems, ks=(1, 4), seconds=3.21)


def problem(samples: int, correct: int, could_not_judge: int = 0) -> EvaluationRecord:
    return EvaluationRecord(0, "a", "t", samples, correct, could_not_judge, 0.5)


def console(
    out: io.StringIO,
    error: io.StringIO | None = None,
    *,
    verbosity: Verbosity = Verbosity.NORMAL,
    clock: Any = None,
    all_groups: bool = False,
) -> Console:
    about: Any = {"title": "grpo+none  lab", "max_steps": 50, "all_groups": all_groups}
    about |= {"redactor": Redactor({"MY_TOKEN": "s3cr3t-value"})} | (
        {"clock": clock} if clock else {}
    )
    return Console(verbosity, out=out, error=error or io.StringIO(), **about)


def test_lines_are_those_of_the_documentation() -> None:
    groups = [GroupScore(3, 8, "120"), GroupScore(0, 8, r"\frac{1}{4}")]
    said = ["  group: 3/8 correct | answer=120", r"  group: 0/8 correct | answer=\frac{1}{4}"]
    assert group_lines(groups, all_groups=False) == said
    said = "loss=-0.0012 | reward=0.188 | correct=18.8% | datums=16 | bs=4 | gs=8 | sepa_l=0.0000"
    assert step_line(STEP) == f"Step 0 [maxrl+gtpo_sepa] | {said} | time=45.2s"


def test_a_placeholder_loss_says_so() -> None:
    line = step_line(replace(STEP, loss=None, reported_loss=0.5, loss_is_placeholder=True))
    assert re.search(r"loss=0\.5000 \(.*placeholder\)", line)


def test_what_is_absent_is_a_dash_and_no_zero() -> None:
    line = step_line(StepRecord(step=7, condition="grpo+none", num_datums=0))
    assert "loss=- " in line and "reward=- " in line and "datums=0 " in line


def test_evaluation_line_shows_the_interval_and_what_could_not_be_judged() -> None:
    line = evaluation_line(evaluation(20, problem(4, 2, could_not_judge=1), problem(4, 1)))
    assert (
        line
        == "Evaluation at step 20 | pass@1=37.5% [0.0%, 100.0%] | pass@4=100.0% [15.8%, 100.0%] |"
        " problems=2 | samples=8 | could_not_judge=1 | time=3.2s"
    )


def test_the_end_compares_before_and_after() -> None:
    before, after = evaluation(0, problem(100, 37)), evaluation(70, problem(10, 8))
    summary = RunSummary(
        "done", "a+b", 0, 70, 140.0, 1234567, before, after, STEP, "checkpoints/final", wall_s=150
    )
    text = "\n".join(summary_lines(summary, Path("logs/lab")))
    assert (
        "70 steps, 1,234,567 tokens, 140.0s of steps and evaluations; this session took 150" in text
    )
    assert re.search(r"pass@1=37\.0%.* -> pass@1=80\.0%", text)
    assert "adapter: logs/lab/checkpoints/final" in text


MANY = [GroupScore(count, 4, "7") for count in (0, 0, 1, 2, 3, 4, 4, 4)] + [GroupScore(0, 0, "7")]


def test_nine_groups_take_one_line_and_eight_take_eight() -> None:
    assert len(group_lines(MANY[:8], all_groups=False)) == 8
    assert group_lines(MANY, all_groups=False) == [
        "  groups: 3 all right, 3 mixed, 2 all wrong, 1 could not be judged"
    ]
    assert len(group_lines(MANY, all_groups=True)) == 9


def story(sink: Console) -> None:
    """Emit what a run emits, in its order."""
    sink.message(LogLine("Loading dataset..."))
    sink.message(LogLine("Pre-encoded 4096 prompts", "4,096 prompts"))
    sink.message("[reward] note")
    sink.emit(StartEvent("cpu"))
    sink.message(LogLine("Parity gate passed: all of it.", "gate: passed"))
    sink.emit(evaluation(0, problem(4, 1), problem(4, 2)))
    sink.emit(GroupScores(MANY))
    counting("Step 0: sampling", 10, sink.message)(None)
    sink.emit(replace(STEP, informative_fraction=0.5, entropy_mean=0.042))
    sink.emit(evaluation(1, problem(4, 3), problem(4, 2)))
    sink.emit(RunSummary("done", "a+b", 0, 1, 1.0, 10, None, None, STEP, "checkpoints/final"))
    sink.close()


def test_quiet_leaves_the_start_the_evaluations_and_the_end(monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for out in (io.StringIO(), Terminal()):
        error = Terminal()
        story(console(out, error, verbosity=Verbosity.QUIET))
        start, facts, gate, *rest = without_codes(out).splitlines()
        assert "grpo+none  lab  cpu" in start and "4,096 prompts" in facts and "gate" in gate
        assert "Evaluation at step 0" in rest[0] and len(rest) == 4
        assert error.getvalue() == "" and "note" not in out.getvalue()


def test_silent_prints_nothing() -> None:
    out, error = io.StringIO(), Terminal()
    story(console(out, error, verbosity=Verbosity.SILENT))
    assert out.getvalue() == "" and error.getvalue() == ""


def test_a_pipe_gets_every_line_and_so_does_verbose(monkeypatch: Any) -> None:
    piped, verbose = io.StringIO(), Terminal()
    story(console(piped))
    story(console(verbose, verbosity=Verbosity.VERBOSE))
    printed = without_codes(verbose).splitlines()
    assert [line for line in piped.getvalue().splitlines() if line not in printed] == []
    lines = piped.getvalue().splitlines()
    assert lines[:2] == ["Loading dataset...", "Pre-encoded 4096 prompts"]
    assert "Step 0 [maxrl+gtpo_sepa] | loss=-0.0012" in piped.getvalue()
    assert "\x1b" not in piped.getvalue()


@pytest.mark.parametrize("width", [1, 40, 60, 80, 140, 200])
def test_a_row_fits_the_terminal(width: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    story(console(out))
    rows = without_codes(out).splitlines()
    if width < 60:  # one word may be longer than the terminal is wide
        return
    assert max(map(len, rows)) < width
    names, values = rows[rows.index(next(row for row in rows if row.startswith("step"))) :][:2]
    assert len(names) == len(values) and values.split()[:3] == ["0", "0.188", "18.8%"]
    assert ("sepa_l" in names) == (width >= 80) and ("all wrong" in names) == (width >= 140)
    assert dict(zip(names.split(), values.split(), strict=False))["trained"] == "2/4"
    assert any(row.startswith("Evaluation at step 1  pass@1=62.5% [") for row in rows)


def test_no_color_and_a_dumb_terminal_have_no_colors(monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    colored, plain = Terminal(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    story(console(colored))
    monkeypatch.setenv("NO_COLOR", "1")
    story(console(plain))
    color = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert color.search(colored.getvalue()) and not color.search(plain.getvalue())
    assert "Loading dataset..." in plain.getvalue() and "Pre-encoded" not in plain.getvalue()


def test_a_terminal_without_the_characters_gets_others() -> None:
    class Narrow(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Narrow(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    story(console(stream, stream))  # type: ignore[arg-type]
    stream.seek(0)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.read())
    assert "Evaluation at step 1" in shown and "\\u25" not in shown and "1/50 -----" in shown


def test_markup_of_a_model_is_printed_as_it_is() -> None:
    out = io.StringIO()
    console(out).emit(GroupScores([GroupScore(1, 2, "[bold red]x[/bold red]")]))
    assert "answer=[bold red]x[/bold red]" in out.getvalue()


def test_secrets_are_masked_on_the_screen() -> None:
    out = io.StringIO()
    console(out).message("connecting to https://me:pw12345@host with s3cr3t-value")
    assert out.getvalue() == "connecting to https://***@host with ***\n"


def test_escape_sequences_are_dropped_and_direction_marks_shown() -> None:
    assert one_line("\x1b[31mred\x1b[0m \x1b]0;title\x07x \x9b2Jy \x1bPq\x1b\\z") == "red x y z"
    assert one_line("12\u202e34") == "12<U+202E>34"
    assert one_line("a\nb\rc") == "a\\nbc"


@given(st.text(st.sampled_from("\x1b\x9b[];?0m\x07\\PX_^ ab\n\r\u202e\u2066\x9d\x00"), max_size=40))
def test_no_text_can_move_the_cursor(text: str) -> None:
    shown = one_line(text)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


@given(st.text(max_size=500))
def test_a_reference_takes_one_short_line(text: str) -> None:
    assert len(one_line(text, 120)) <= 120


def test_a_narrow_encoding_shows_escapes() -> None:
    assert encodable("π\ud800", "ascii") == "\\u03c0\\ud800"
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(redactor=Redactor({}), out=stream, error=io.StringIO()).message("π")
    stream.seek(0)
    assert stream.read() == "\\u03c0\n"


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sink = console(Gone())
    sink.message("one")
    sink.message("two")


def test_a_full_disk_under_standard_output_is_not_taken_for_the_runs() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(EnvironmentFailure, match="Standard output or error cannot be written"),
        writing_to(Path("run"), "start it again"),
    ):
        console(Full()).message("a line")


@pytest.mark.parametrize(("verbosity", "has_bar"), [(1, False), (2, True), (3, True)])
def test_the_bar_says_what_a_terminal_waits_for(
    verbosity: int, has_bar: bool, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    times = iter(range(100_000))
    out, pipe = Terminal(), io.StringIO()
    for stream in (out, pipe):
        sink = console(stream, verbosity=Verbosity(verbosity), clock=lambda: float(next(times)))
        told = counting("Evaluation at step 7:", 1200, sink.message)
        for _ in range(1034):
            told(None)
        sink.emit(replace(STEP, step=7))
        told(None)
        sink.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert ("Evaluation at step 7: 1,035/1,200" in shown) == has_bar
    assert (" 8/50 " in shown) == ("ETA" in shown) == has_bar
    assert "Evaluation" not in pipe.getvalue()


def test_a_pipe_is_reminded_of_a_long_phase_and_of_no_other(monkeypatch: Any) -> None:
    monkeypatch.setattr("retrain.tracking.console.REMINDER_S", 0.05)
    out, error = io.StringIO(), io.StringIO()
    sink = console(out, error)
    told = counting("Encoding prompts", 4096, sink.message)
    told(None)
    end = time.monotonic() + 10
    while not error.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    sink.emit(evaluation(1, problem(4, 3)))
    said = error.getvalue()
    time.sleep(0.2)
    sink.close()
    assert error.getvalue() == said
    assert set(said.splitlines()) == {"Still at: Encoding prompts 1/4,096"}
    assert out.getvalue().startswith("Evaluation at step 1 | ")
