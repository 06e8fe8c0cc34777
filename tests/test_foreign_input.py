"""Whatever a command line or a folder holds, the answer is a sentence and an exit code: never a
traceback, never a hang.
"""

import importlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.cli.main import main
from retrain.cli.usage import COMMANDS
from retrain.config import config_from_mapping, config_from_toml, dump_toml, load_config, names
from retrain.config.keys import all_keys, flags, keys_by_path
from retrain.config.names import ABSENT, SYNONYMS, synonym
from retrain.config.overrides import parse_overrides
from retrain.errors import ConfigurationError, RetrainError
from retrain.records.disk import path_error
from tests.campaigns import problems
from tests.marks import first_of
from tests.wrong_inputs import LAB, inside

NASTY = {
    "an integer of 5,000 digits": "9" * 5000,
    "an integer of 80 bits": "1" + "0" * 24,
    "nesting": "[" * 400 + "]" * 400,
    "nested tables": "{a=" * 400 + "1" + "}" * 400,
    "nested JSON": '{"a":' * 3000 + "1" + "}" * 3000,
    "a table with an integer of 5,000 digits": "a=" + "9" * 5000,
    "a name of 300 letters": "a" * 300,
    "a path of such names": "/".join(["a" * 300] * 20),
    "a NUL": "a\0b",
    "a user who is not there": "~nosuchuser/x",
    "infinity": "1e400",
    "an unpaired surrogate": "\udc80",
    "nothing": "",
    "a folder": ".",
}
READERS = [name for name in COMMANDS if name not in ("init", "migrate-config", "version", "eval")]
SLOW = ("explain", "report")
"""Read a model or draw figures where nothing is wrong, so they get fewer of the options."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small configuration whose log_dir holds a run already, so that no command
    line starts one.
    """
    folder = tmp_path_factory.mktemp("place")
    (folder / "run.toml").write_text(f'{LAB}[logging]\nlog_dir = "old"\n')
    run_folder(folder / "old")
    return folder


def run_folder(folder: Path, **values: Any) -> Path:
    """What a run of two steps leaves, without its weights."""
    folder.mkdir(parents=True)
    text = 'model.model = "lab"\ntraining = {seed = 1, max_steps = 2}\nevaluation.at_end = true'
    (folder / "config.toml").write_text(dump_toml(config_from_toml(text)))
    (folder / ".retrain.json").write_text('{"kind": "run", "format": 1}')
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "condition": "a+b", "loss": 0.1}) + "\n" for n in range(2))
    )
    (problem,) = problems([1])
    (folder / "evaluation.jsonl").write_text(json.dumps(problem.to_json() | {"step": 2}) + "\n")
    (folder / "summary.json").write_text('{"status": "done"}')
    (folder / "environment.json").write_text("{}")
    return folder


def answered(*argv: str) -> int:
    """The exit code; an exception that is no sentence ends the test."""
    code = main(list(argv))
    assert code in (0, 1, 2, 3)
    return code


# -- command lines ---------------------------------------------------------------------------------


@pytest.mark.faults("wrong files and command lines")
@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_no_value_of_a_flag_is_a_traceback(
    value: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: dict[tuple[Any, ...], str] = {}
    for (
        flag,
        path,
    ) in flags().items():  # one flag for each kind of value, and every one that names a file
        key = keys_by_path().get(path)
        if key is not None and path != "logging.log_dir":
            kinds.setdefault(
                (key.type_name, key.allowed, *[str(item) for item in key.field.metadata]), flag
            )
    with inside(place):
        for flag in kinds.values():
            assert answered("run.toml", f"{flag}={value}") in (2, 3), flag
    for line in capsys.readouterr().err.splitlines():
        assert len(line) < 1300


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "explain" else []) for name in READERS],
)
def test_no_argument_of_a_command_is_a_traceback(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"retrain.cli.{command.replace('-', '_')}")
    app = typer.Typer(add_completion=False)
    app.command(command, **getattr(module, "SETTINGS", {}))(module.command)
    options = [
        item.opts[0]
        for item in typer.main.get_command(app).params
        if item.param_type_name == "option" and not item.is_flag
    ]  # type: ignore[attr-defined]
    with inside(place):
        for value in list(NASTY.values())[:7] if command in SLOW else NASTY.values():
            answered(command, value)
            for option in options[:2] if command in SLOW else options:
                answered(
                    command, "old" if command != "explain" else "run.toml", f"{option}={value}"
                )


@pytest.mark.faults("wrong files and command lines")
@pytest.mark.parametrize("value", NASTY.values(), ids=NASTY)
def test_no_name_of_a_file_is_a_traceback(value: str, tmp_path: Path) -> None:
    with inside(tmp_path):
        assert answered(value) == 2


@pytest.mark.parametrize(
    "text",
    [
        "[training]\n" + "\n".join(f"k{n} = 1" for n in range(100_000)),
        pytest.param("\n".join(f"[s{n}]" for n in range(100_000)), marks=pytest.mark.slow),
    ],
    ids=["keys", "sections"],
)
def test_a_hundred_thousand_unknown_keys_get_twenty_sentences_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        config_from_toml(text)
    assert (
        time.process_time() - began < 30
    )  # one or two, half of it Python's own parser; if it grew with the square, it would be minutes
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "There are 99,980 more problems; fix these first."


def test_a_hundred_thousand_unknown_flags_get_twenty_sentences_at_once() -> None:
    began = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        parse_overrides([f"--k{n}" for n in range(100_000)])
    assert time.process_time() - began < 5
    assert len(caught.value.problems) == 21


def test_a_list_of_unknown_rewards_reads_the_installed_plugins_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(names, "entry_points", lambda group: reads.append(group) or [])
    names._installed_plugins.cache_clear()
    with pytest.raises(ConfigurationError, match=r'type = \["r0", "r1".* is not known') as caught:
        config_from_mapping({"reward": {"type": [f"r{n}" for n in range(1000)]}})
    names._installed_plugins.cache_clear()
    assert len(caught.value.problems) == 1
    assert reads == ["retrain.plugins"]


def test_a_folder_that_a_plugin_makes_twice_is_not_called_a_file(tmp_path: Path) -> None:
    """It is a fault of that code, and its traceback says where."""
    with pytest.raises(FileExistsError) as caught:
        tmp_path.mkdir()
    assert path_error(caught.value) is None


# -- what a name was meant to be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("learning-rate", "--lr"),
        ("learning_rate", "--lr"),
        ("num-generations", "--group-size"),
        ("per-device-train-batch-size", "--batch-size"),
        ("max-completion-length", "--max-tokens"),
        ("max-new-tokens", "--max-tokens"),
        ("num-train-epochs", "--max-steps"),
        ("beta", "--loss-kl-coef"),
        ("epsilon", "--loss-clip-low"),
        ("max-grad-norm", "--loss-max-grad-norm"),
        ("output-dir", "--log-dir"),
        ("batchsize", "--batch-size"),
        ("n", "--group-size"),
        ("gs", "--group-size"),
        ("rollout.n", "--group-size"),
        ("kl", "--loss-kl-coef"),
        ("steps", "--max-steps"),
        ("betas", "--beta1"),
        ("alpha", "--lora-alpha"),
        ("warmup", "--lr-warmup-steps"),
        ("eps_clip", "--loss-clip-low"),
        ("reward", "--reward-type"),
        ("num_workers", "--reward-workers"),
        ("eval_temperature", "--evaluation-temperature"),
        ("clip-hihg", "--loss-clip-high"),
        ("adam_eps", "--eps"),
        ("source", "--data-source"),
        # Of the earlier project.
        ("bp-ema-decay", "--backpressure-ema-decay"),
        ("bp-enabled", "--backpressure-enabled"),
        ("bp-max-batch-size", "--backpressure-max-batch-size"),
        ("optim-beta1", "--beta1"),
        ("optim-eps", "--eps"),
        ("backend-opt", "--options"),
        ("attention-kernel", "--inference-attention-kernel"),
        ("resume-from", "--resume"),
        ("kv-cache-dtype", "--inference-kv-cache-dtype"),
        ("prefix-caching", "--inference-prefix-caching"),
        ("tinker-max-concurrent", "--max-concurrent"),
        ("tinker-throttle-dir", "--throttle-dir"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_ours(name: str, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name} is not a flag; did you mean {flag}\\?"):
        parse_overrides([f"--{name}", "1"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[training]\nlearning_rate = 1e-4",
            r"\[training\] learning_rate is not a key; did you mean lr\?",
        ),
        (
            "[algorithm]\nnum_generations = 4",
            r"num_generations is not a key; did you mean \[training\] group_size\?",
        ),
        (
            '[[campaign.conditions]]\ntransform_mode = "none"\nlearning_rate = 1e-4',
            r"learning_rate is not a key of a condition; did you mean training\.lr\?",
        ),
        ("[training]\ngamma = 1.0", r"\[training\] gamma is not a key; there is no critic"),
        ('[training]\nscale_rewards = "group"', r'"grpo_std" for "group" or true, "grpo" for "no'),
        ('[loss]\nloss_type = "bnpo"', r'"token_mean" for "bnpo" or "dapo", and "const'),
        ("[optimizer]\nepsilon = 1", r"epsilon is not a key; did you mean eps\?"),
        ("[loss]\nepsilon = 1", r"epsilon is not a key; did you mean clip_low\?"),
        ("[evaluation]\nn = 1", r"n is not a key; did you mean samples\?"),
        ("[training]\nn = 1", r"n is not a key; did you mean group_size\?"),
        ("[lora]\nr = 1", r"r is not a key; did you mean \[model\] lora_rank\?"),
        ("[data]\nurl = 1", r"url is not a key; url belongs under \[inference\]"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours_wherever_it_stands(
    text: str, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        config_from_toml(text)


def test_a_variable_of_another_trainer_is_answered_with_ours() -> None:
    with pytest.raises(ConfigurationError, match="did you mean RETRAIN_TRAINING_LR"):
        load_config("examples/all_keys.toml", environ={"RETRAIN_TRAINING_LEARNING_RATE": "1"})


@pytest.mark.parametrize(
    "name",
    ["debug", "yes", "cap", "sft", "l2", "no-wandb", "world_size", "adam", "port-number", "abc"],
)
def test_a_flag_like_no_other_gets_no_guess(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_overrides([f"--{name}"])
    assert "did you mean" not in str(caught.value)


def test_a_setting_that_has_no_key_is_answered_with_what_is_done_instead() -> None:
    for name, clause in ABSENT.items():
        assert not synonym(name) and name not in {key.name for key in all_keys()}, name
        with pytest.raises(ConfigurationError) as caught:
            parse_overrides([f"--{name}", "1"])
        assert caught.value.problems == (f"--{name} is not a flag; {clause}.",)


def test_every_synonym_leads_to_a_key_and_is_itself_no_key_that_would_be_taken() -> None:
    for name, path in SYNONYMS.items():
        assert path in keys_by_path(), name
        assert flags().get(f"--{name.replace('_', '-')}", path) == path, name


# -- folders ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("../" * 3)
    | st.just("a" * 300),
    lambda item: (
        st.lists(item, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["runs", "step", "name", "dir", "kind", "path", "status", "squeeze", "run_id", "x"]
            ),
            item,
            max_size=4,
        )
    ),
    max_leaves=8,
)
SHAPES = (
    "null",
    "3",
    "-1",
    "1e999",
    '"a"',
    "[]",
    "[[]]",
    "{",
    "",
    "\0",
    "\udc80",
    '{"a":' * 3000,
    "9" * 5000,
    "[" * 2000,
)
"""Texts that are no object, or no JSON at all."""


def look(folder: Path) -> None:
    from retrain import load_runs

    for argv in (
        ("status", str(folder)),
        ("status", str(folder), "--json"),
        ("compare", str(folder)),
        ("inspect", str(folder)),
    ):
        answered(*argv)
    answered("power", str(folder))
    answered("compare", str(folder), "--baseline", str(folder))
    try:
        load_runs(folder)
    except RetrainError as error:
        assert "\n" not in str(error)


def written(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))


FILES = (
    "config.toml",
    "metrics.jsonl",
    "evaluation.jsonl",
    "summary.json",
    "environment.json",
    ".retrain.json",
    "manifest.json",
)
OTHERS = (".lock.owner", "checkpoints.json", "trainer_state.json")


@pytest.mark.faults("wrong files and command lines")
@pytest.mark.parametrize("name", first_of([*FILES, *OTHERS], quick=4))
def test_a_file_of_another_shape_in_a_run_is_a_sentence(name: str, tmp_path: Path) -> None:
    whole = run_folder(tmp_path / "whole")
    for number, text in enumerate(
        [f"{shape}\n" if name.endswith("l") else shape for shape in SHAPES]
    ):
        folder = Path(shutil.copytree(whole, tmp_path / f"run{number}"))
        written(name, text)(folder)
        look(folder)
    folder = Path(shutil.copytree(whole, tmp_path / "with-a-folder"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    look(folder)


def both_as_run_and_above(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "run"
    written(name, text)(folder)
    for argv in (
        ("status", str(folder)),
        ("status", str(tmp_path)),
        ("compare", str(folder), "--baseline", str(folder)),
    ):
        answered(*argv)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    value=JSON,
    name=st.sampled_from(
        ["summary.json", "environment.json", ".retrain.json", "checkpoints.json", "manifest.json"]
    ),
)
def test_any_json_in_a_file_of_a_run_is_survived(
    value: Any, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("any")
    run_folder(place / "run")
    both_as_run_and_above(place, name, json.dumps(value))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    value=JSON,
    field=st.sampled_from(["step", "condition", "loss", "correct_rate", "step_time_s"])
    | st.sampled_from(["num_datums", "samples", "correct", "task"]),
)
def test_any_json_in_a_line_is_survived(
    value: Any, field: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("line")
    folder = run_folder(place / "run")
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        first, *rest = (folder / name).read_text().splitlines()
        (folder / name).write_text(
            "\n".join([*rest, json.dumps(json.loads(first) | {field: value})]) + "\n"
        )
    look(folder)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    entry=st.dictionaries(
        st.sampled_from(["name", "condition", "seed", "dir", "status", "reason"]), JSON, max_size=6
    ),
    whole=st.booleans(),
)
def test_any_entry_in_a_campaigns_manifest_is_survived(
    entry: dict[str, Any], whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("campaign")
    run_folder(place / "runs" / "a_s1")
    good = {"name": "a_s1", "condition": "a", "seed": 1}
    (place / "manifest.json").write_text(
        json.dumps({"runs": [good, good | entry if whole else entry]})
    )
    look(place)
