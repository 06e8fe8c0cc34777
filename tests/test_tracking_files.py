"""A run's files: lines that survive a crash, numbers that JSON cannot hold, secrets that never
reach the disk.
"""

import hashlib
import json
import math
import re
import resource
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrain import train
from retrain.config import TrainConfig, load_config, replaced
from retrain.errors import RunFailed
from retrain.records.entries import EMERGENCE_FIELDS, EvaluationRecord, GenerationRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import (
    Extent,
    JsonlWriter,
    encode_line,
    read_jsonl,
    read_jsonl_backwards,
    truncate_to_step,
)
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.records.sound import changed_log
from retrain.records.state import TrainerState
from retrain.records.summary import RunSummary
from retrain.records.token_table import TokenTable, read_tokens, write_tokens
from retrain.tracking.base import Generations, StartEvent
from retrain.tracking.files import RunFiles, spread
from tests.runs import small

CONTRACT_NAMES = """step condition loss reported_loss loss_is_placeholder mean_reward correct_rate running_correct_rate sepa_lambda
sepa_gate_open num_datums informative_fraction truncated_fraction batch_size next_batch_size group_size ratio_max mismatch_k1
mismatch_kl grad_norm completion_tokens_mean entropy_mean exec_entropy_mean exec_entropy_var plan_entropy_mean plan_entropy_var
exec_surprisal_mean exec_surprisal_var plan_surprisal_mean plan_surprisal_var uncertainty_kind reward_could_not_judge
groups_skipped_all_correct groups_skipped_all_wrong groups_skipped_other max_abs_advantage sepa_gate_step surprisal_kept_fraction
surprisal_tau ratio_mean ess truncated_reward_mean nonfinite_updates time_sample_s time_reward_s time_credit_s time_learn_s
step_time_s tokens_per_s peak_memory_gib""".split()  # noqa: SIM905

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def generation(
    step: int = 0, prompt: str = "p", sample: int = 0, text: str = ""
) -> GenerationRecord:
    return GenerationRecord(step, prompt, sample, "1+1=", text, 1.0, "right", 0.5, "stop", 3)


def run_files(folder: Path, **logging: object) -> RunFiles:
    config = TrainConfig.model_validate({"logging": logging})
    return RunFiles(config, RunFolder(folder), Redactor({"WANDB_API_KEY": "0123456789abcdef"}))


def test_step_record_has_every_name_of_the_contract() -> None:
    assert set(CONTRACT_NAMES) <= set(StepRecord(step=0, condition="grpo+none").to_json())


def test_absent_is_null_and_never_zero() -> None:
    record = StepRecord(step=3, condition="grpo+none").to_json()
    present = {name for name, value in record.items() if value is not None}
    assert present == {"step", "condition", "loss_is_placeholder"}


def test_step_record_reads_lines_of_other_versions() -> None:
    known = {"step": 3, "condition": "grpo+none", "loss": 0.5}
    assert StepRecord.from_json(known | {"key_of_a_later_version": 1}) == StepRecord(**known)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
@example({"a\u2028": ["b\u2029c", {"d": "\x85e\x0b\x0c\x1c\x1d\x1e\r\\u2028"}]})
def test_a_line_reads_back_as_it_was_written(record: dict[str, object]) -> None:
    line = encode_line(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1, "as other readers take it"
    assert json.loads(line) == record


def test_a_line_that_holds_a_line_separator_is_read_as_one(tmp_path: Path) -> None:
    """Earlier versions wrote it as it is, and so do other programs."""
    path = tmp_path / "generations.jsonl"
    records = [{"step": step, "completion": f"{step}\u2028b\u2029c\x85d"} for step in range(3)]
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    assert list(read_jsonl(path)) == records
    assert list(read_jsonl_backwards(path)) == records[::-1]
    truncate_to_step(path, 2)
    assert list(read_jsonl(path)) == records[:2]


def test_nonfinite_numbers_are_null_and_named() -> None:
    record = {"loss": math.nan, "grad_norm": np.float32(np.inf), "inner": [1.0, -math.inf]}
    line = json.loads(encode_line(record | {"ess": np.float32(0.5)}))
    assert line.pop("nonfinite") == ["loss", "grad_norm", "inner[1]"]
    assert line == {"loss": None, "grad_norm": None, "inner": [1.0, None], "ess": 0.5}


def test_lone_surrogates_are_escaped() -> None:
    line = encode_line({"completion": "a\ud800b \U0001f600"})
    assert b"\\ud800" in line
    assert json.loads(line.decode("utf-8"))["completion"] == "a\ud800b \U0001f600"


def test_a_torn_last_line_is_left_out_and_never_glued_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "lo')
    assert [line["step"] for line in read_jsonl(path)] == [0]
    with closing(JsonlWriter(path)) as writer:
        writer.write({"step": 1})
    assert [line["step"] for line in read_jsonl(path)] == [0, 1]


def test_every_prefix_of_a_file_is_readable(tmp_path: Path) -> None:
    data = b"".join(encode_line({"step": step, "text": "é\n"}) for step in range(3))
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        assert [line["step"] for line in read_jsonl(path)] == list(range(data[:cut].count(b"\n")))


NO_STEP = r", has no step, which every line"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, NO_STEP) for line in ('{"loss": 1}', '{"step": true}', '{"step": -1}')),
        ('{"st', ""),
    ],
)
def test_a_damaged_line_or_one_without_a_step_is_named(
    tmp_path: Path, line: str, said: str
) -> None:
    """Its readers take the step of every line as given."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    with pytest.raises(RunFailed, match=rf"metrics\.jsonl, line 2{said}"):
        list(read_jsonl(path))


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real, writes = os.write, []
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or real(file, data))
    with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.write({"text": "x" * 100_000})
        writer.write({"step": 1})
    assert len(writes) == 2 and all(data.endswith(b"\n") for data in writes)


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(path)]


def test_resume_cuts_every_file_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder, files = RunFolder(tmp_path), run_files(tmp_path, generations_every=1)
    extents = {}
    for step in range(6):
        if step == 4:
            extents = files.sync()
        files.emit(Generations(step, [generation(step)]))
        files.emit(StepRecord(step=step, condition="grpo+none"))
    files.close()
    for step in (0, 3, 4):
        folder.step_tokens(step).parent.mkdir(exist_ok=True)
        folder.step_tokens(step).touch()
    state = TrainerState(seed=0, config_hash="", step=4, files=extents)
    assert changed_log(folder, vars(state)) == ""
    folder.cut_to(state, print)
    logs = (folder.metrics, folder.emergence_steps, folder.generations)
    assert [steps_of(path) for path in logs] == [[0, 1, 2, 3]] * 3
    kept = sorted(path.name for path in folder.tokens.iterdir())
    assert kept == ["step_0.safetensors", "step_3.safetensors"]
    asides = [path.with_name(f"{path.name}.aside") for path in logs]
    assert [steps_of(path) for path in asides] == [[4, 5]] * 3
    folder.cut_to(state, print)
    again = run_files(tmp_path, generations_every=1)
    again.sync()
    # Until a new row is on the disk, whatever is looked at before.
    assert [steps_of(path) for path in asides] == [[4, 5]] * 3
    with folder.metrics.open("ab") as file:  # a kill tears the first row of the resume
        file.write(b'{"step": ')
    folder.cut_to(state, print)
    before = folder.metrics.read_bytes()
    truncate_to_step(folder.metrics, 3)  # a resume from an older checkpoint
    folder.metrics.write_bytes(before)  # as if a kill came before the truncation
    truncate_to_step(folder.metrics, 3)
    assert steps_of(asides[0]) == [3, 4, 5]
    again.emit(StepRecord(step=4, condition="grpo+none"))
    assert [path.exists() for path in asides] == [False, False, True]
    again.close()


def test_what_a_run_without_a_checkpoint_has_made_is_kept_until_it_is_made_again(
    tmp_path: Path,
) -> None:
    folder, files = RunFolder(tmp_path), run_files(tmp_path)
    files.emit(StepRecord(step=0, condition="grpo+none"))
    files.close()
    folder.forget_steps()
    folder.forget_steps()
    assert not folder.metrics.exists() and steps_of(tmp_path / "metrics.jsonl.aside") == [0]
    folder.empty()
    assert not list(tmp_path.glob("**/*.aside"))


def test_an_evaluation_that_was_cut_while_it_was_written_leaves_no_row(tmp_path: Path) -> None:
    """A checkpoint of step 4 that a signal asked for during its evaluation; the next session was
    killed while it wrote the rows.
    """
    folder, files = RunFolder(tmp_path), run_files(tmp_path)
    files.emit(Evaluation(2, problems(step=2), ks=[1]))
    extents = files.sync()
    files.emit(Evaluation(4, problems(step=4), ks=[1]))
    files.close()
    last = TrainerState(seed=0, config_hash="", step=4, last_evaluation=2, files=extents)
    folder.cut_to(last, print)
    assert steps_of(folder.evaluation) == [2, 2]


def problems(step: int) -> list[EvaluationRecord]:
    return [EvaluationRecord(step, f"problem-{index}", "task", 1, 1, 0, 1.0) for index in range(2)]


def test_a_checkpoint_that_does_not_say_how_far_the_files_reach_is_not_used(tmp_path: Path) -> None:
    RunFolder(tmp_path).metrics.write_bytes(b'{"step": 0}\n')
    problem = changed_log(RunFolder(tmp_path), vars(TrainerState(0, "", step=1)))
    assert problem == "it does not say how far metrics.jsonl reached"


def test_a_line_that_the_disk_refuses_is_written_whole_when_there_is_room(
    tmp_path: Path, small_files: None
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlWriter(path)) as writer:
        writer.write({"step": 0})
        writer.write({"step": 1, "text": "x" * 150_000})  # 100 kB of the file is all that fits
        assert writer.is_behind
        writer.write({"step": 2})
        assert steps_of(path) == [0]
        with pytest.raises(OSError, match=r"File too large.*metrics\.jsonl"):
            writer.sync()
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        extent = writer.sync()
        assert not writer.is_behind
    assert steps_of(path) == [0, 1, 2]
    assert extent == Extent(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_an_extent_goes_on_where_an_earlier_session_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        with closing(JsonlWriter(path)) as writer:
            writer.write({"step": step})
            extent = writer.sync()
    assert extent == Extent(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_truncation_keeps_the_bytes_of_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "x":  "\\ud800"}\n{"step": 1}\n{"step"')
    truncate_to_step(path, 1)
    assert path.read_bytes() == b'{"step": 0, "x":  "\\ud800"}\n'
    assert {item.name for item in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.jsonl.aside"}


def test_a_step_is_written_to_metrics_and_emergence(tmp_path: Path) -> None:
    files = run_files(tmp_path)
    files.emit(StepRecord(step=0, condition="grpo+none", correct_rate=0.5, loss=math.nan))
    files.close()
    [line] = read_jsonl(RunFolder(tmp_path).metrics)
    assert line["loss"] is None and line["nonfinite"] == ["loss"]
    [summary] = read_jsonl(RunFolder(tmp_path).emergence_steps)
    assert tuple(summary) == EMERGENCE_FIELDS and summary["correct_rate"] == 0.5


def test_generations_follow_their_two_keys(tmp_path: Path) -> None:
    files = run_files(tmp_path, generations_every=2, generations_per_step=3)
    for step in range(4):
        rows = [generation(step, prompt, sample) for prompt in "ab" for sample in range(4)]
        files.emit(Generations(step, rows))
    files.close()
    written = read_jsonl(RunFolder(tmp_path).generations)
    lines = [(line["step"], line["prompt_id"], line["sample"]) for line in written]
    assert lines == [(step, *place) for step in (0, 2) for place in (("a", 0), ("b", 0), ("a", 1))]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(0, 15))
def test_recorded_generations_cover_as_many_prompts_as_they_can(
    prompts: list[str], count: int
) -> None:
    chosen = spread([generation(prompt=prompt) for prompt in prompts], count)
    assert len(chosen) == min(count, len(prompts))
    assert len({record.prompt_id for record in chosen}) == min(count, len(set(prompts)))


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef"
    address = f"https://me:hunter22@host/?token={secret}"
    monkeypatch.setattr("sys.argv", ["retrain", "--base-url", address])
    monkeypatch.chdir(tmp_path)
    files = run_files(tmp_path / "run", wandb_run_name=f"run-{secret}")
    files.emit(StartEvent("cpu"))
    text = f"the key is {secret} and hf_abcdefghijklmnopqrst"
    files.emit(Generations(0, [generation(text=text)]))
    files.emit(StepRecord(step=0, condition="grpo+none"))
    files.emit(RunSummary("done", "grpo+none", 0, 1, 1.0, 10, None, None, None, f"/x/{secret}"))
    files.close()
    written = {
        path.name: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    assert {"config.toml", "environment.json", "generations.jsonl", "summary.json"} <= set(written)
    for name, text in written.items():
        for leaked in (secret, "hunter22", "hf_abcdefghijklmnopqrst"):
            assert leaked not in text, name


def test_environment_holds_versions_and_no_environment_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_ORDINARY_VARIABLE", "a-value-of-the-environment")
    monkeypatch.chdir(tmp_path)
    files = run_files(tmp_path / "run")
    files.emit(StartEvent("cpu"))
    text = (tmp_path / "run" / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["packages"]["torch"].startswith("2.")
    assert environment["device"] == "cpu"
    assert environment["git"] is None
    assert environment["folders"] == [str(tmp_path)]
    assert "a-value-of-the-environment" not in text
    monkeypatch.chdir("/")
    files.emit(StartEvent("cpu"))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["folders"] == [str(tmp_path)]
    (resumed,) = environment["resumed"]
    assert "folders" not in resumed  # nothing reads them there


def test_token_tables_read_back_in_the_order_of_their_stages(tmp_path: Path) -> None:
    stages = {
        "episode": np.ones(5, np.float32),
        "gtpo": np.full(5, 2, np.float32),
        "alpha": np.zeros(5, np.float32),
    }
    table = TokenTable(
        offsets=np.array([0, 2, 5]),
        slot=np.array([0, 0], np.int32),
        sample=np.array([0, 1], np.int32),
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=-np.arange(5, dtype=np.float32),
        entropies=None,
        mask=np.array([0, 1, 1, 0, 0], np.uint8),
        advantages=stages,
    )
    write_tokens(tmp_path / "tokens" / "step_3.safetensors", table, 3)
    back = read_tokens(tmp_path / "tokens" / "step_3.safetensors")
    assert list(back.advantages) == list(stages)
    assert back.entropies is None
    assert back.mask is not None
    np.testing.assert_array_equal(back.mask, table.mask)
    np.testing.assert_array_equal(back.advantages["gtpo"], stages["gtpo"])
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["step_3.safetensors"]


KINDS = (
    r"Loaded \.env",
    r"Loading tokenizer for lab \.\.\.",
    r"Loading vocabulary table\.\.\.",
    r"Vocabulary table: \d+ entries",
    r"Loading dataset\.\.\.",
    r"Loaded \d+ examples",
    r"Pre-encoded \d+ prompts",
    r"Loading train model: lab on cpu\.\.\.",
    r"trainable params: [\d,]+ \|\| all params: [\d,]+ \|\| trainable%: [\d.]+",
    r"LocalTrainHelper ready \(engine=pytorch, split_mode=False\)\.",
    r"  group: \d/4 correct \| answer=\d+",
    (
        r"Step 0 \[\*\*\*\] \| loss=\S+ \| reward=\S+ \| correct=\S+ \| datums=\d+ \| bs=2 \| gs=4"
        r" \| sepa_l=- \| time=\S+s"
    ),
)
"""The kinds of lines that getting-started shows for the local backend, in their order."""


def test_output_log_keeps_the_lines_of_a_pipe_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", "open-sesame-12")
    config = small(Path("run"), training={"max_steps": 1}, logging={"label": "open-sesame-12"})
    train(config, said=["Loaded .env"], skip_parity=True)
    printed, output = capsys.readouterr().out, Path("run/output.log")
    lines = output.read_text(encoding="utf-8").splitlines()
    assert printed.splitlines() == lines and "open-sesame" not in printed
    found = [
        next((number for number, line in enumerate(lines) if re.fullmatch(kind, line)), -1)
        for kind in KINDS
    ]
    assert -1 not in found and found == sorted(found)
    with output.open("a", encoding="utf-8") as file:
        file.write("torn by a ki")
    train(replaced(config, {"resume.from": "run", "training.max_steps": 2}), skip_parity=True)
    assert load_config("run/config.toml").resume.from_ == ""
    grown = output.read_text(encoding="utf-8").splitlines()
    assert grown == lines + capsys.readouterr().out.splitlines()
    assert "Resuming run after 1 step." in grown and "Step 1 [" in "\n".join(grown)


def test_a_run_whose_output_is_its_log_writes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    with folder.output.open("w", encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert folder.output not in folder.written()
        files = run_files(tmp_path)
        files.message("a line")
        files.emit(StartEvent("cpu"))
        files.close()
    assert folder.output.read_text(encoding="utf-8") == ""
    assert folder.output in folder.written()
