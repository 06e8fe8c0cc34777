"""The supervised stage: what it learns from, its gradient, its resume, its records."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.analysis.runs import PlannedRun, StoredRun
from retrain.cli.main import main
from retrain.config import TrainConfig, config_from_mapping, dump_toml
from retrain.data.lab import examples as lab_examples
from retrain.data.sources import Reason, register_source
from retrain.data.traces import Trace, TraceSet, load_traces
from retrain.errors import ConfigurationError, Interrupted, RunFailed
from retrain.model.text import TextModel, load_text_model
from retrain.records.checkpoint import CheckpointStore
from retrain.records.run_folder import RunFolder
from retrain.records.sound import sound
from retrain.report.data import held_out_points
from retrain.run.notes import notes
from retrain.run.parts import check_plugins
from retrain.run.saver import steps_at
from retrain.run.session import Session
from retrain.run.supervised import SupervisedStage
from retrain.types import Example
from tests.learner_models import config_for, distance, gradients, make_learner, make_rows
from tests.learner_reference import row_scores
from tests.runs import assert_same_run, lines, small, small_run, timeless
from tests.stops import killed

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
SUM = {"prompt": "1 + 2 = ?", "completion": "It is 3."}


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(config_for().model.model_copy(update={"model": "lab"}))


def traces_of(rows: list[dict[str, Any]], folder: Path, text: TextModel, **sft: Any) -> Any:
    path = folder / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sections = {
        "model": {"model": "lab"},
        "data": sft.pop("data", {"source": "lab"}),
        "environment": sft.pop("environment", {}),
    }
    config = config_from_mapping({**sections, "sft": {"source": str(path), "steps": 1, **sft}})
    return load_traces(config, text)


def parts(trace: Trace, text: TextModel) -> list[tuple[str, bool]]:
    return list(trace.texts(text.decode))


def test_a_trace_is_the_prompt_of_rl_and_a_completion_that_ends_its_turn(
    tmp_path: Path, text: TextModel
) -> None:
    said = {"user": SUM["prompt"], "assistant": SUM["completion"]}
    talk = [{"role": role, "content": content} for role, content in said.items()]
    rows = [
        SUM,
        SUM | {"completion": talk[1:]},
        SUM | {"completion": "It is 3.<|im_end|>"},
        {"prompt": json.dumps(talk[:1]), "completion": json.dumps(talk[1:])},
        {"completion": None, "messages": talk},  # as a data frame of both forms has it
    ]
    data = {"source": "lab", "system_prompt": "Add.", "prompt_template": "Q: {prompt}"}
    head = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nQ: 1 + 2 = ?<|im_end|>\n"
    expected = [(f"{head}<|im_start|>assistant\n", False), ("It is 3.<|im_end|>", True)]
    for trace in traces_of(rows, tmp_path, text, data=data).traces:
        assert parts(trace, text) == expected
        row = trace.row(4)
        assert row.group == 4
        assert row.num_actions == len(row.advantages) == trace.spans[0][1] - trace.spans[0][0]
        assert set(row.advantages) == {1.0}


LAB = {"provider": "retrain.environments.lab.NumberGuessing"}
BESIDE = {
    "an environment": {"data": {}, "environment": LAB},
    "a mixture": {"data": {"mix": [{"environment": LAB}, {"source": "math"}]}},
}


@pytest.mark.parametrize("sections", BESIDE.values(), ids=BESIDE.keys())
def test_beside_other_problems_a_trace_s_prompt_is_its_own(
    sections: dict[str, Any], tmp_path: Path, text: TextModel
) -> None:
    (trace,) = traces_of([SUM], tmp_path, text, **sections).traces
    asked = "<|im_start|>user\n1 + 2 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert parts(trace, text)[0][0] == asked


@pytest.mark.parametrize("sections", BESIDE.values(), ids=BESIDE.keys())
def test_problems_without_traces_need_a_source_of_traces(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"\[sft\] source is empty, and .* gives problems"):
        config_from_mapping({**sections, "sft": {"steps": 1}})


def test_each_reply_of_a_conversation_is_learned_at_its_place(
    tmp_path: Path, text: TextModel
) -> None:
    roles = ["user", "assistant"] * 2
    talk = [{"role": role, "content": word} for role, word in zip(roles, "abcd", strict=True)]
    (trace,) = traces_of([{"messages": talk}], tmp_path, text).traces
    found = parts(trace, text)
    whole = text.tokenizer.apply_chat_template(talk, tokenize=False)
    assert "".join(part for part, _ in found) == whole.rstrip("\n")
    assert [part for part, learned in found if learned] == ["b<|im_end|>", "d<|im_end|>"]


def test_rows_that_cannot_be_traces_are_counted_and_named(tmp_path: Path, text: TextModel) -> None:
    call = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f"}}]}
    user = {"role": "user", "content": " "}
    rows: list[dict[str, Any]] = [
        *(SUM | {"completion": one} for one in (SUM["completion"], " ", None, "3" * 100, [call])),
        {"prompt": "1 + 2 = ?"},
        SUM | {"messages": [user, user]},
        *({"messages": [user, *reply]} for reply in ([], [call], [user | {"role": "assistant"}])),
    ]
    found = traces_of(rows, tmp_path, text, max_tokens=80)
    assert len(found) == 1
    (note,) = (note for note in found.notes if "Dropped traces" in note)
    assert f"3 {Reason.NO_COMPLETION} (first: traces.jsonl line 2)" in note
    assert f"2 {Reason.MALFORMED} (first: traces.jsonl line 6)" in note
    assert f"2 {Reason.TOOL_CALLS} (first: traces.jsonl line 5)" in note
    assert f"1 {Reason.TOO_LONG} (traces-3)" in note
    assert f"1 {Reason.BOTH} (traces.jsonl line 7)" in note
    sft = {"source": str(tmp_path / "traces.jsonl"), "steps": 1, "evaluate_every": 1}
    stage = SupervisedStage.load(config_from_mapping({"model": {"model": "lab"}, "sft": sft}), text)
    assert "heldout_logprob in sft.jsonl stays null" in stage.traces.notes[-1]


def test_a_template_that_rewrites_earlier_turns_leaves_the_row_out(
    tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text.tokenizer, "chat_template", DROPS_THOUGHTS)
    reply = {"role": "assistant", "content": "<think>x</think>y"}
    user = {"role": "user", "content": "a"}
    found = traces_of([{"messages": [user, reply, user, reply]}, SUM], tmp_path, text)
    assert len(found) == 1
    assert f"1 {Reason.REWRITTEN} (traces-0)" in found.notes[-1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "answer": "b"}], "a trace has a prompt and a completion"),
        ([{"prompt": "a", "completion": ""}], "1 without a completion"),
        ([], "it is empty"),
    ],
)
def test_no_usable_trace_is_refused(
    rows: list[dict[str, Any]], says: str, tmp_path: Path, text: TextModel
) -> None:
    unusable = r"\[sft\] source = .* has no usable trace"
    with pytest.raises(ConfigurationError, match=unusable) as told:
        traces_of(rows, tmp_path, text)
    assert says in str(told.value)


def test_solutions_are_traces_and_answers_are_not(tmp_path: Path, text: TextModel) -> None:
    row = {"problem": "1 + 2?", "solution": r"It is \boxed{3}.", "type": "Geometry"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    data = {"source": "math", "path": str(tmp_path / "train.jsonl")}
    config = config_from_mapping({"data": data, "sft": {"epochs": 2, "batch_size": 3}})
    found = load_traces(config, text)
    assert found is not None and found.steps(config) == 1
    assert parts(found.traces[0], text)[1] == (r"It is \boxed{3}.<|im_end|>", True)
    register_source("sums", lambda: [Example("1 + 2 = ?", "3")])
    config = config_from_mapping({"data": {"source": "sums"}, "sft": {"steps": 1}})
    with pytest.raises(ConfigurationError, match="no usable trace: 1 without a completion"):
        load_traces(config, text)


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_its_gradient_is_the_one_of_cross_entropy_in_float64(family: str, text: TextModel) -> None:
    """Whatever [loss] and [training] say about reinforcement, and however the rows are cut."""
    loss = {"mode": "ppo", "kl_coef": 0.5, "entropy_coef": 0.1, "aggregation": "sequence_mean"}
    config = config_for(family, loss=loss, sft={"steps": 4, "lr": 0.0})
    learner = make_learner(config, 40)
    rows = make_rows()
    stage = SupervisedStage(config, TraceSet((), ()), None, text)
    learner.begin(stage.learner_config, supervised=True)
    result = learner.train(rows, 0)
    ours = gradients(learner)
    model = learner.weights.model.double()
    model.zero_grad()
    scored = [torch.stack(row_scores(model, row, 1.0)[0]) for row in rows]
    loss64 = -torch.cat(scored).mean()
    loss64.backward()
    assert result.loss == pytest.approx(loss64.item(), rel=1e-5)
    assert distance(ours, gradients(learner)) < 1e-5


SFT: dict[str, Any] = {
    "lora": {"dropout": 0.2},
    "sft": {"steps": 5, "batch_size": 4, "lr": 3e-3, "lr_schedule": "cosine", "evaluate_every": 2},
    "evaluation": {"at_start": True, "at_end": True, "max_examples": 4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for name, first in (("train", 0), ("test", 30)):
        numbers = range(first, first + 30)
        rows = [{"prompt": f"{n} + 1 = ?", "completion": f"It is {n + 1}."} for n in numbers]
        rows[-1]["prompt"] = lab_examples("heldout", 1)[0].prompt
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, data: Path, **sections: dict[str, Any]) -> TrainConfig:
    merged = {name: SFT.get(name, {}) | sections.get(name, {}) for name in {*SFT, *sections}}
    merged["sft"] = {"source": str(data)} | merged["sft"]
    return small(folder, **merged)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    small_run(run(folder, data), quiet=True)
    return folder


def test_a_run_learns_its_traces_before_its_first_step(straight: Path) -> None:
    steps = lines(straight / "sft.jsonl")
    assert [step["step"] for step in steps] == list(range(5))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[4]["heldout_logprob"] > steps[0]["heldout_logprob"] + 0.3
    assert [step["heldout_logprob"] is None for step in steps] == [False, True] * 2 + [False]
    assert steps[0]["lr"] == 3e-3
    assert steps[4]["lr"] < 1e-3
    assert [step["step"] for step in lines(straight / "metrics.jsonl")] == [0, 1, 2, 3]
    for name, due in (("sft_evaluation", [0, 2, 4]), ("evaluation", [0, 4])):
        assert [*dict.fromkeys(line["step"] for line in lines(straight / f"{name}.jsonl"))] == due
    summary = json.loads((straight / "summary.json").read_text(encoding="utf-8"))
    assert summary["evaluation"]["before"]["stage"] == "sft"
    assert summary["evaluation"]["after"]["step"] == 4
    counted = sum(step["tokens"] for step in steps)
    assert summary["tokens"] > counted > 0
    log = (straight / "output.log").read_text(encoding="utf-8")
    assert "Supervised step 4 | loss=" in log
    assert "Held-out problems that are in training too: 1," in log


def stopped(cut: tuple[str, int], config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.evaluate_if_due

    def stop(session: Session) -> None:
        if session.state.place == cut:
            raise Interrupted("cut", signal.SIGINT)
        real(session)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "evaluate_if_due", stop)
        small_run(config, quiet=True)


@pytest.mark.parametrize(
    "cut",
    [("sft", 3), ("rl", 0), pytest.param(("rl", 1), marks=pytest.mark.slow)],
    ids=lambda cut: f"{cut[0]} {cut[1]}",
)
def test_a_resume_in_either_stage_equals_the_straight_run(
    cut: tuple[str, int],
    straight: Path,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    stopped(cut, run(folder, data), monkeypatch)
    small_run(run(folder, data, resume={"from": str(folder)}), quiet=True)
    assert_same_run(straight, folder, 4)
    name = "sft_evaluation.jsonl"
    assert (folder / name).read_bytes() == (straight / name).read_bytes()
    assert timeless(folder / "sft.jsonl") == timeless(straight / "sft.jsonl")
    log = (folder / "output.log").read_text(encoding="utf-8")
    assert f"Resuming {folder} after {steps_at(cut)}." in log


def test_a_kill_costs_the_steps_since_the_last_checkpoint_of_the_stage(
    straight: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a kill at supervised step 3: the newest checkpoint is that of step 2, and rows of a
    later step stand in the file.
    """
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for path in (folder / "checkpoints").iterdir():
        if path.name != "sft_000002":
            shutil.rmtree(path)
    assert main(["eval", str(folder), "--output", str(tmp_path / "answers")]) == 0
    assert "Evaluation at supervised step 2 |" in capsys.readouterr().out
    small_run(run(folder, data, resume={"from": str(folder)}), quiet=True)
    assert_same_run(straight, folder, 4)


def test_a_prompt_may_lie_in_a_field_of_a_column(tmp_path: Path, text: TextModel) -> None:
    row = {"q": {"text": SUM["prompt"]}, "completion": SUM["completion"]}
    data = {"source": "lab", "prompt_column": "q.text"}
    assert traces_of([row], tmp_path, text, data=data).traces


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_kl_term_may_be_against_the_weights_after_the_stage(
    train: str, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "model": {"train": train},
        "training": {"lr": 1e-2, "max_steps": 2, "save_every": 1},
    }
    for reference in ("base", "start"):
        loss = {"kl_coef": 0.01, "kl_reference": reference}
        small_run(run(tmp_path / reference, data, **sections, loss=loss), quiet=True)
    first, start = (
        [step["kl_mean"] for step in lines(tmp_path / name / "metrics.jsonl")]
        for name in ("base", "start")
    )
    assert start[0] < 1e-9 < first[0] and start[1] > 1e-9
    cut = run(tmp_path / "cut", data, **sections, loss=loss)
    stopped(("rl", 1), cut, monkeypatch)
    again = {"resume": {"from": str(tmp_path / "cut")}}
    small_run(run(tmp_path / "cut", data, **sections, loss=loss, **again), quiet=True)
    assert_same_run(tmp_path / "start", tmp_path / "cut", 2)
    assert main(["verify", str(tmp_path / "cut"), "--steps", "1:2"]) == 0
    weights = next((tmp_path / "cut/checkpoints/start").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    more = sections | {"training": {"lr": 1e-2, "max_steps": 3}}
    with pytest.raises(RunFailed, match=r"start cannot be used: .* differs .* put it back"):
        small_run(run(tmp_path / "cut", data, **more, loss=loss, **again), quiet=True)


@pytest.fixture(scope="module", params=["lora", "full"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: Path
) -> tuple[Path, dict[str, Any]]:
    """A run of both stages by the command line, and its sections."""
    sections = {"model": {"train": request.param}, "training": {"save_every": 2}}
    folder = tmp_path_factory.mktemp(request.param) / "run"
    file = folder.with_suffix(".toml")
    file.write_text(dump_toml(run(folder, data, **sections)), encoding="utf-8")
    assert killed(file, folder, 99, 240) == 0
    return folder, sections


@pytest.mark.slow
@pytest.mark.faults("kills in either stage, resumed")
def test_a_run_killed_in_either_stage_resumes_to_the_same_bytes(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, data: Path, kill: int
) -> None:
    """`pytest tests/test_sft.py -m faults --kills 20` kills more often."""
    straight, sections = whole
    folder, file, rng = tmp_path / "run", tmp_path / "run.toml", random.Random(kill)
    file.write_text(dump_toml(run(folder, data, **sections)), encoding="utf-8")
    killed(file, folder, 1 + kill % 9, rng.uniform(0, 0.3))
    assert killed(file, folder, 99, 240) == 0
    assert_same_run(straight, folder, 4)
    name = "sft_evaluation.jsonl"
    assert (folder / name).read_bytes() == (straight / name).read_bytes()


def test_a_resume_with_other_traces_is_refused(straight: Path, tmp_path: Path, data: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(straight, folder)
    shutil.copytree(data, other)
    row = json.dumps({"prompt": "another", "completion": "trace"})
    (data / "train.jsonl").write_text(f"{row}\n", encoding="utf-8")
    try:
        with pytest.raises(ConfigurationError, match=r"\[sft\] source = .* holds other examples"):
            small_run(run(folder, data, resume={"from": str(folder)}), quiet=True)
    finally:
        shutil.copytree(other, data, dirs_exist_ok=True)


def test_the_report_and_the_status_tell_the_stage(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "supervised stage, 5 steps" in page and "The supervised stage is left of 0." in page
    assert [point.step for point in held_out_points(StoredRun(folder))] == [-5, -3, -1, 0, 4]
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink()
    capsys.readouterr()
    main(["status", str(folder)])
    assert "5 supervised steps taken." in capsys.readouterr().out
    shutil.copytree(straight, folder, dirs_exist_ok=True)
    (folder / "sft.jsonl").write_bytes(b"")
    assert "sft.jsonl has 0 bytes instead of" in sound(RunFolder(folder), StoredRun(folder).config)


def test_reinforcement_draws_what_it_would_draw_without_the_stage(
    tmp_path: Path, data: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a learning rate of 0 the two runs are one."""
    for name, steps in (("with", 3), ("without", 0)):
        sft = {"steps": steps, "lr": 0.0, "evaluate_every": 0}
        quick = {"at_start": False, "at_end": False}
        config = run(tmp_path / name, data, sft=SFT["sft"] | sft, evaluation=quick)
        small_run(config, quiet=True)
    assert timeless(tmp_path / "with/metrics.jsonl") == timeless(tmp_path / "without/metrics.jsonl")
    assert main(["diff", str(straight), str(tmp_path / "with")]) == 1
    assert "First difference: step 0, in sft.jsonl." in capsys.readouterr().out


def test_its_order_is_the_seed_s_alone(data: Path, text: TextModel) -> None:
    config = run(data / "run", data)
    traces = load_traces(config, text)
    assert traces is not None
    drawn = [traces.batch(step, 16, seed) for seed in (3, 3, 4) for step in (0, 1)]
    batches = [[tuple(row.token_ids.tolist()) for row in batch] for batch in drawn]
    assert batches[:2] == batches[2:4] != batches[4:]
    passed = [*batches[0], *batches[1]][: len(traces)]
    assert len(set(passed)) == len(traces)  # each once a pass


def test_a_plain_supervised_run_ends_after_its_stage(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    planned = PlannedRun("c", 1, "c_s1")
    for more in ({"max_hours": 1e-9}, {}, {}):
        resume = {"from": str(folder) if folder.exists() else ""}
        ended = small_run(run(folder, data, training={"max_steps": 0} | more, resume=resume))
        assert ended.records() == []
        cut = "max_hours = 1e-09 came within the supervised stage; give" if more else ""
        assert cut in StoredRun(folder, planned).unfinished
        assert bool(cut) == bool(StoredRun(folder, planned).unfinished)
    assert not (folder / "metrics.jsonl").exists()
    assert CheckpointStore(folder / "checkpoints").steps() == [0]
    assert (folder / "checkpoints/final/adapter_model.safetensors").is_file()
    printed = capsys.readouterr().out
    for words in ("step 0 -> pass@1=", "0 of 5 supervised steps; continue", "--max-steps 1`"):
        assert words in printed
    assert main(["status", str(folder)]) == 0
    assert "done" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 2
    assert "has a supervised stage alone" in capsys.readouterr().err
    aside = data.rename(tmp_path / "aside")
    assert main(["eval", str(folder)]) == 0  # An evaluation needs no traces.
    aside.rename(data)
    assert main(["export", str(folder), "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "for 0 steps of reinforcement learning after a supervised stage." in card


def test_a_missing_plugin_and_an_evaluation_that_nobody_asked_for_are_named() -> None:
    sft = {"source": "no_such.traces", "steps": 1, "evaluate_every": 1}
    config = config_from_mapping({"model": {"model": "lab"}, "data": {"source": "lab"}, "sft": sft})
    told = r'\[sft\] source = "no_such.traces" does not load'
    with pytest.raises(ConfigurationError, match=told):
        check_plugins(config)
    assert any("set [evaluation] at_end = true" in note for note in notes(config))


def test_explain_shows_what_is_learned(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nmodel = "lab"\n[data]\nsource = "lab"\n[training]\nmax_tokens = 24\n'
        f'[backend]\ndevices = "cpu"\n[sft]\nsource = "{data}"\nepochs = 2\nlr = 1e-3\n',
        encoding="utf-8",
    )
    assert main(["explain", str(file), "--probe", "--max-steps", "0"]) == 0
    printed = capsys.readouterr().out
    assert "for 4 supervised steps of 16, at lr 0.001 and temperature 1" in printed
    assert "[learned: It is 1.<|im_end|>]" in printed
