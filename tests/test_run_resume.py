"""Resume is exact: N steps equal k steps + resume + N - k steps, byte for byte, wherever the run
was cut.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.analysis.runs import StoredRun
from retrain.backends.rows import learning_rate
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import plan_campaign
from retrain.cli.main import main
from retrain.config import TrainConfig, dump_toml, load_config, replaced, resume_differences
from retrain.config.stored import begun_by, campaign_command, config_hash
from retrain.errors import ConfigurationError, Interrupted, RunFailed
from retrain.model.text import resolve_model
from retrain.records.run_folder import RunFolder, mark
from retrain.run.notes import _spent_rate_note
from retrain.run.session import Session
from retrain.run.start import part_of_session
from tests import commands
from tests.runs import assert_same_run, lines, small, small_run
from tests.stops import PLACED, Placed, Random, killed, stop_twice

STEPS = 8
EVERYTHING: dict[str, Any] = {
    "algorithm": {"transform_mode": "gtpo_sepa"},
    "sepa": {"schedule": "auto", "steps": 4, "delay_steps": 1, "warmup": 2},
    "lora": {"dropout": 0.2},
    "training": {
        "max_steps": STEPS,
        "updates_per_batch": 2,
        "minibatches": 2,
        "lr_schedule": "cosine",
        "lr_warmup_steps": 2,
        "save_every": 2,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
    },
    "loss": {"mode": "ppo", "kl_coef": 0.01, "max_grad_norm": 1.0, "old_logprobs": "recomputed"},
    "evaluation": {"every": 3, "at_start": True, "max_examples": 4},
    "logging": {"tokens_every": 2},
}
"""A run in which every stateful part has state."""


def merged(**extra: dict[str, Any]) -> dict[str, Any]:
    return {
        section: EVERYTHING.get(section, {}) | extra.get(section, {})
        for section in {*EVERYTHING, *extra}
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    small_run(small(folder, **EVERYTHING), quiet=True)
    return folder


def test_the_straight_run_learned_something_at_every_step(straight: Path) -> None:
    """Otherwise the equalities below would hold for any bug."""
    records = lines(straight / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert all(record["num_datums"] > 0 and record["grad_norm"] > 0 for record in records)


def run_until(
    cut: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: dict[str, Any]
) -> None:
    """Interrupt a run between two steps, as a signal does."""
    real = Session.evaluate_if_due

    def stop_at_cut(session: Session) -> None:
        if session.state.step == cut:
            raise Interrupted("cut", signal.SIGINT)
        real(session)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Session, "evaluate_if_due", stop_at_cut)
        small_run(small(folder, **(settings or EVERYTHING)), quiet=True)


@pytest.mark.parametrize("cut", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_k_steps_and_a_resume_equal_the_straight_run(
    straight: Path, tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run_until(cut, folder, monkeypatch)
    small_run(small(folder, **merged(resume={"from": str(folder)})), quiet=True)
    assert_same_run(straight, folder, STEPS)


def test_a_run_cut_before_its_last_evaluation_is_sealed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a comparison takes its evaluations for rows that somebody added."""
    settings = {"training": {"max_steps": 2}, "evaluation": {"at_end": True, "max_examples": 2}}
    run_until(2, tmp_path / "run", monkeypatch, **settings)
    resume = {"from": str(tmp_path / "run")}
    small_run(small(tmp_path / "run", **settings, resume=resume), quiet=True)
    folder = RunFolder(tmp_path / "run")
    assert lines(folder.evaluation)[-1]["step"] == 2
    assert StoredRun(folder.path).unsound == ""


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_costs_steps_but_no_bytes(
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    run_until(5, folder, monkeypatch)
    adapter = folder / "checkpoints/step_000005/adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1] + bytes([adapter.read_bytes()[-1] ^ 1]))
    small_run(small(folder, **merged(resume={"from": str(folder)})))
    assert "step_000005 is not used: adapter_model.safetensors differs" in capsys.readouterr().out
    assert (folder / "checkpoints" / "damaged-step_000005").is_dir()
    assert_same_run(straight, folder, STEPS)


@pytest.mark.slow
@pytest.mark.faults("kills at random moments, resumed")
def test_a_killed_run_resumes_to_the_same_bytes(straight: Path, tmp_path: Path, kill: int) -> None:
    """`pytest tests/test_run_resume.py --kills 20` kills more often."""
    folder = tmp_path / "run"
    config = small(folder, **EVERYTHING)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    # The last bits of a sum depend on the number of threads, so the killed run has as many as the
    # straight one in this process.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "retrain", str(file), "--quiet", "--skip-parity"]
    process = commands.Command(command, env=environment)
    metrics, rng = folder / "metrics.jsonl", random.Random(kill)
    wanted = rng.randrange(STEPS)
    while process.poll() is None and (
        len(lines_so_far(metrics)) < wanted or not (folder / ".retrain.json").exists()
    ):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    process.kill()
    process.wait(60)
    commands.run([*command, "--resume", str(folder)], env=environment, check=True)
    assert_same_run(straight, folder, STEPS)


@pytest.mark.slow
def test_a_run_with_everything_at_once_killed_repeatedly_has_the_same_bytes(
    tmp_path: Path, pytestconfig: Any
) -> None:
    """Back pressure, redraws and a correction beside the rest; `--kills` says how often one run is
    killed.
    """
    more = merged(
        algorithm={"surprisal_mask_rho": 0.8},
        training={
            "dynamic_sampling": 2,
            "keep_checkpoints": 2,
            "group_size": 2,
            "save_every": 3,
            "weight_decay": 0.01,
        },
        loss={"correction": "tis", "entropy_coef": 0.001},
        backpressure={
            "enabled": True,
            "warmup_steps": 1,
            "max_batch_size": 2,
            "cooldown": 0,
            "min_r2": 0.0,
        },
        evaluation={"samples": 2, "k": [1, 2], "at_end": True},
    )
    whole, cut, rng, kills = (
        tmp_path / "whole",
        tmp_path / "cut",
        random.Random(1),
        pytestconfig.getoption("kills"),
    )
    for folder in (whole, cut):
        (tmp_path / f"{folder.name}.toml").write_text(
            dump_toml(small(folder, **more)), encoding="utf-8"
        )
    assert killed(tmp_path / "whole.toml", whole, STEPS, 240) == 0
    for number in range(kills):
        killed(
            tmp_path / "cut.toml",
            cut,
            rng.randrange(1 + number * STEPS // kills, 1 + (number + 1) * STEPS // kills),
            rng.uniform(0, 0.5),
        )
    assert killed(tmp_path / "cut.toml", cut, STEPS, 240) == 0
    assert len({record["batch_size"] for record in lines(whole / "metrics.jsonl")}) > 1
    assert any(record["groups_redrawn"] for record in lines(whole / "metrics.jsonl"))
    assert_same_run(whole, cut, STEPS)


def test_every_chosen_moment_is_one_of_the_package() -> None:
    """All but the first ones are tried in the long form alone."""
    assert all(callable(placed.find()[2]) for placed in PLACED)


@pytest.mark.slow
@pytest.mark.faults("two signals at chosen and random moments, resumed")
def test_two_signals_save_nothing_and_the_resumed_run_has_the_same_bytes(
    straight: Path, tmp_path: Path, moment: Placed | Random
) -> None:
    """`pytest tests/test_run_resume.py --stops 50` tries all moments. A run that had not begun leaves
    no folder, or its lock where the second signal came at its removal, and begins anew.
    """
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text(dump_toml(small(folder, **EVERYTHING)), encoding="utf-8")
    assert stop_twice(file, folder, moment, torch.get_num_threads()) == 130
    begun = folder.exists() and [path.name for path in folder.iterdir()] != [".lock"]
    assert begun or (isinstance(moment, Random) and not moment.steps)
    resume = {"from": str(folder)} if begun else {}
    small_run(small(folder, **merged(resume=resume)), quiet=True)
    assert_same_run(straight, folder, STEPS)


def test_without_periodic_checkpoints_the_end_and_a_stop_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = {"training": {"save_every": 0, "max_steps": 3}}

    def stopped(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    real = Session.turn_to_learning
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(
            Session,
            "turn_to_learning",
            lambda self, used: (stopped(self.state.step), real(self, used=used))[1],
        )
        small_run(small(folder, **config), quiet=True)
    (stop,) = (folder / "checkpoints").glob("step_*")
    small_run(small(folder, **config, resume={"from": str(folder)}), quiet=True)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {stop.name, "step_000003", "final"} and stop.name in (
        "step_000001",
        "step_000002",
    )


def lines_so_far(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def test_what_may_not_change_is_refused_with_both_values(straight: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"lr.*0\.5.*0\.001|lr.*0\.001.*0\.5"):
        small_run(
            small(straight, **merged(training={"lr": 0.5}, resume={"from": str(straight)})),
            quiet=True,
        )


def test_a_run_that_goes_on_with_other_model_files_says_so_and_records_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = tmp_path / "model", tmp_path / "run"
    shutil.copytree(resolve_model("lab"), model)
    config = small(folder, model={"model": str(model)}, training={"max_steps": 2, "save_every": 1})
    small_run(config)
    first = json.loads((folder / "environment.json").read_text())["model_sha256"]
    (model / "notes.txt").write_text("other")
    said = f'[model] model = "{model}" has other files'
    for steps, damaged in ((3, False), (4, True)):
        assert said not in capsys.readouterr().out
        if damaged:
            (folder / "environment.json").unlink()
        changes = {"training.max_steps": steps, "resume.from": str(folder)}
        small_run(replaced(config, changes, origin="flag"))
        stored = json.loads((folder / "environment.json").read_text())
        if damaged:
            assert stored["model_sha256"] != first and said not in capsys.readouterr().out
        else:
            assert stored["model_sha256"] == first != stored["resumed"][-1]["model_sha256"]
            assert said in capsys.readouterr().out


def test_a_run_that_begins_again_without_a_checkpoint_records_the_files_that_it_has() -> None:
    found: dict[str, Any] = {"model_sha256": "first", "resumed": [{"step": 0}, {"step": 4}]}
    assert part_of_session(found, goes_on=False) is found
    assert part_of_session(found, goes_on=True) is found["resumed"][-1]


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        small_run(small(tmp_path / "x", resume={"from": str(tmp_path)}), quiet=True)


def test_a_run_without_a_step_left_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(small(tmp_path, training={"max_steps": 1}), quiet=True)
    small_run(small(tmp_path, training={"max_steps": 1}, resume={"from": str(tmp_path)}))
    said = capsys.readouterr().out
    assert "1 steps of [training] max_steps = 1" in said.partition("Loading tokenizer")[0]
    assert "To train longer: `retrain " in said and f"--resume {tmp_path} --max-steps 2`" in said


def falling(folder: Path, steps: int, **training: Any) -> TrainConfig:
    """A resume of a run of one step with a falling rate, to another number of steps."""
    begun = {"max_steps": 1, "lr_schedule": "linear"}
    if not folder.exists():
        small_run(small(folder, training=begun), quiet=True)
    more = begun | {"max_steps": steps} | training
    return small(folder, training=more, resume={"from": str(folder)})


def test_more_steps_change_a_falling_rate_only_if_the_user_names_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigurationError) as refused:
        small_run(falling(folder, 3), quiet=True)
    assert "At steps 0, 1, 2" in str(refused.value)
    assert "--lr-horizon 1 makes it 0.001, 0, 0" in str(refused.value)
    assert "--lr-horizon 3 makes it 0.001, 0.000667, 0.000333" in str(refused.value)
    assert small_run(falling(folder, 3, lr_horizon=3), quiet=True).summary.steps == 3
    resumed = json.loads((folder / "environment.json").read_text())["resumed"][-1]
    assert resumed["step"] == 1
    assert resumed["changed"] == ["training.max_steps (1, 3)", "training.lr_horizon (0, 3)"]
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["config_hash"] == config_hash(falling(folder, 3, lr_horizon=3))


@pytest.mark.parametrize("changes", [{"lr_schedule": "constant"}, {"lr_horizon": 1}])
def test_another_schedule_or_the_old_horizon_may_be_named_with_more_steps(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(falling(tmp_path / "run", 2, **changes))
    spent = "From step 1 on the learning rate is 0, so 1 step of 2 will learn nothing."
    assert (spent in capsys.readouterr().out) == ("lr_horizon" in changes)


def test_the_schedule_alone_may_not_change_at_resume(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"lr_schedule = .* at resume without another max_steps;"
    ):
        small_run(falling(tmp_path / "run", 1, lr_schedule="cosine"), quiet=True)


def test_a_credential_in_a_url_is_stored_masked_and_is_no_difference_at_resume(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    url = {"model": {"base_url": "https://me:hunter2secret@example.org"}}
    small_run(small(folder, **url, training={"max_steps": 1}), quiet=True)
    assert "hunter2secret" not in (folder / "config.toml").read_text()
    assert (
        small_run(
            small(folder, **url, training={"max_steps": 2}, resume={"from": str(folder)}),
            quiet=True,
        ).summary.steps
        == 2
    )


def test_a_run_that_failing_rewards_stopped_goes_on_once_they_are_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    (tmp_path / "judge_of_test.py").write_text(
        "from pathlib import Path\n\ndef score(response, reference):\n    assert not"
        f" Path({str(broken)!r}).exists(), 'judge is down'\n    return float(len(response) % 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    sections = {
        "reward": {"type": "custom", "custom_module": "judge_of_test"},
        "training": {"max_steps": 6},
    }
    resumed = small(folder, **sections, resume={"from": str(folder)})
    broken.touch()
    for config, steps in ((small(folder, **sections), 1), (resumed, 2)):
        with pytest.raises(
            RunFailed,
            match=r"8 of 8 completions of the last step .*judge is down.* then continue with `retrain .*--resume",
        ):
            small_run(config, quiet=True)
        assert len(lines(folder / "metrics.jsonl")) == steps
    broken.unlink()
    small_run(resumed, quiet=True)
    assert [line["reward_could_not_judge"] for line in lines(folder / "metrics.jsonl")] == [
        8,
        8,
        0,
        0,
        0,
        0,
    ]


# -- the commands that are printed -----------------------------------------------------------------


def printed_commands(text: str) -> list[list[str]]:
    """The command lines between backquotes that continue something."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(retrain [^`]*--resume[^`]*)`", text)]


def test_every_printed_command_continues_the_run_whatever_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has another configuration as ./retrain.toml; the run has a file, a flag, and a
    folder with a space.
    """
    monkeypatch.chdir(tmp_path)
    Path("retrain.toml").write_text(
        dump_toml(small(Path("other"), training={"max_steps": 9, "lr": 1e-6}))
    )
    Path("my.toml").write_text(
        dump_toml(small(Path("logs/my run"), training={"max_steps": 2, "max_hours": 1e-9}))
    )
    flags = ["my.toml", "--lr", "3e-4"]
    assert main(flags) == 0
    assert Path("logs/my run/checkpoints/step_000001").is_dir()  # max_hours saves
    (again,) = printed_commands(capsys.readouterr().out)
    assert main(flags) == 2
    (held,) = printed_commands(capsys.readouterr().err)
    assert again[:3] == held == ["logs/my run/config.toml", "--resume", "logs/my run"]
    assert main([*again[:-1], "1"]) == 0 and again[-2] == "--max-hours" and float(again[-1]) > 1e-9
    assert [line["step"] for line in lines(Path("logs/my run/metrics.jsonl"))] == [
        0,
        1,
    ] and not Path("other").exists()


def test_resume_without_a_file_reads_the_runs_own_or_a_newer_retrain_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[TrainConfig] = []
    told: list[str] = []

    def started_with(config: TrainConfig, *, said: list[str], **_: bool) -> None:
        started.append(config)
        told[:] = said

    monkeypatch.setattr("retrain.run.loop.train", started_with)
    run, beside = RunFolder(Path("logs/run")), Path("retrain.toml")
    run.create()
    run.config.write_text(dump_toml(small(run.path, training={"seed": 7, "lr": 3e-4})))
    begun = small(run.path, training={"seed": -1})  # the seed was drawn, and --lr 3e-4 was given

    def resumed(*flags: str) -> str:
        assert main(["--resume", "logs/run", *flags]) == 0
        (line,) = told
        return line

    assert resumed("--max-steps", "9") == "Read logs/run/config.toml."
    assert (started[-1].training.max_steps, started[-1].training.lr, started[-1].resume.from_) == (
        9,
        3e-4,
        "logs/run",
    )
    beside.write_text(dump_toml(begun))
    assert (
        resumed() == "Read logs/run/config.toml, and not retrain.toml, which describes another run:"
        " [training] lr = 0.001 (was 0.0003)."
    )
    assert started[-1].training.lr == 3e-4
    assert resumed("--lr", "1e-3") == "Read retrain.toml, which describes this run."
    beside.write_text(dump_toml(replaced(begun, {"training.lr": 3e-4, "training.max_steps": 50})))
    assert (
        resumed()
        == "Read retrain.toml, which describes this run, with changes: [training] max_steps = 50"
        " (was 4)."
    )
    assert started[-1].training.max_steps == 50
    beside.write_text("[training]\nlr = fast\n")
    assert resumed().startswith("Read logs/run/config.toml, and not retrain.toml: retrain.toml ")


def test_resuming_a_campaign_without_a_file_asks_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mark(Path("logs/c"), "campaign")
    assert main(["--resume", "logs/c"]) == 2
    said = capsys.readouterr().err
    assert "logs/c holds a campaign" in said and "`retrain FILE --resume logs/c`" in said


def test_the_printed_command_of_a_campaign_has_its_file_and_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("camp.toml").write_text(
        '[campaign]\nseeds = [0]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode'
        ' = "none"\n'
    )
    given = shlex.split(
        "--lr 3e-4 --campaign-seeds 1,2 --no-plugins-strict --advantage-param cap=0.5"
        " --data-system-prompt \"a 'b' c\""
    )
    secret = load_config("camp.toml", [*given, "--transform-param", "password=short"], {})
    kept = Manifest.of_plan(plan_campaign(secret, Path("c")), datetime.now().astimezone())
    assert '--transform-params={password = "***"}' in kept.command
    config = load_config("camp.toml", given, {})
    (command,) = printed_commands(
        f"`{campaign_command(begun_by(config), Path('logs/a campaign'))}`"
    )
    again = load_config(command[0], command[1:], {})
    assert command[0] == "camp.toml" and again.resume.from_ == "logs/a campaign"
    assert not resume_differences(config, again) and again.campaign == config.campaign


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"data": {"source": "lines.jsonl"}}, "no usable training row"),
        ({"algorithm": {"advantage_mode": "no.such"}}, "does not load"),
        ({"lora": {"target_modules": ["zzz"]}}, "no such linear layer"),
    ],
)
def test_a_refused_run_leaves_no_folder_behind(
    wrong: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text('{"question": "1+1", "gold": "2"}\n')
    (tmp_path / "here").mkdir()
    config = small(
        Path("here/logs/run"),
        **wrong,
        backend={"devices": "cpu", "adapter_path": str(tmp_path / "adapters" / "mine")},
    )
    with pytest.raises(ConfigurationError, match=said):
        small_run(config, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "lines.jsonl"] and not [
        *Path("here").iterdir()
    ]


def test_a_refused_run_deletes_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="does not load"):
        small_run(small(tmp_path / "run", algorithm={"advantage_mode": "no.such"}), quiet=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_warm_up_beyond_the_horizon_is_no_rate_of_zero() -> None:
    training = small(
        Path("nowhere"),
        training={"max_steps": 9, "lr_schedule": "linear", "lr_horizon": 2, "lr_warmup_steps": 4},
    ).training
    assert [learning_rate(training, step) > 0 for step in range(9)] == [True] * 5 + [False] * 4
    assert _spent_rate_note(training).startswith("From step 5 on the learning rate is 0, so 4 ")
