"""`retrain man`: the manual, its topics, its generated parts."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.cli.main import main
from retrain.cli.manual import BEGIN, END, read_source, source_path, topics_of
from retrain.cli.usage import COMMANDS
from retrain.config import load_config
from retrain.config.keys import all_keys, section_models
from retrain.data.prompts import load_examples, messages_of
from scripts.docs_check import check_command

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the manual's source that a test may spoil, in place of the package's."""
    copy = tmp_path / "manual.txt"
    copy.write_text(read_source())
    monkeypatch.setattr("retrain.cli.manual.source_path", lambda: copy)
    monkeypatch.setattr("retrain.cli.man.source_path", lambda: copy)
    return copy


def test_every_command_and_every_section_has_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "--list-topics", "--json"]) == 0
    topics = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"quickstart", "variables", *COMMANDS, *section_models()} <= set(topics)
    assert {
        topics["quickstart"]["kind"],
        topics["explain"]["kind"],
        topics["training"]["kind"],
    } == {"guide", "command", "section"}
    assert main(["man", "--list-topics"]) == 0
    assert re.search(r"^  quickstart +\S", capsys.readouterr().out, re.MULTILINE)


def test_a_topic_as_json_holds_its_text_and_a_sections_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["man", "--format", "json", "--topic", "quickstart"]) == 0
    assert "retrain init --template lab" in json.loads(capsys.readouterr().out)["text"]
    assert main(["man", "lr", "--json"]) == 0
    assert "--lr  (lr = 4e-05)" in json.loads(capsys.readouterr().out)["text"]
    assert main(["man", "training", "--json"]) == 0
    keys = {row["key"]: row for row in json.loads(capsys.readouterr().out)["keys"]}
    assert set(keys) == {key.path for key in all_keys() if key.section == "training"}
    assert keys["training.lr"] | {"doc": ""} == {
        "key": "training.lr", "type": "float", "default": 4e-5, "allowed": "a number of at least 0",
        "flag": "--lr",
        "variable": "RETRAIN_TRAINING_LR", "doc": "",
    }  # fmt: skip


def test_the_whole_manual_fits_80_columns_and_shows_no_marks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["man"]) == 0
    shown = capsys.readouterr().out
    assert BEGIN not in shown and END not in shown
    assert all(f"== {name} ==" in shown for name in ("quickstart", "hicra", "explain"))
    assert not [line for line in shown.splitlines() if len(line) > 80 and "Example:" not in line]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quikstart"], "did you mean `retrain help quickstart`?"),
        (["--path", "--sync"], "exclude each other"),
        (["zzz"], "--list-topics"),
    ],
)
def test_what_is_no_topic_is_answered_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["man", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_package_carries_the_source_and_it_is_up_to_date(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["man", "--path"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == source_path() and path.is_relative_to(ROOT / "retrain")
    assert "== quickstart ==" in path.read_text()
    assert main(["man", "--check"]) == 0


def test_sync_mends_the_generated_parts_and_keeps_what_was_written(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = source.read_text()
    for old, new in (
        ("== hicra ==\n", "== hicra ==\nWhy I use it.\n\n"),
        ("--hicra-alpha", "--hicra-old"),
        (
            "== sepa ==",
            f"== gone ==\n{BEGIN}\nnothing\n{END}\n\n== mine ==\n\nNotes.\n\n== sepa ==",
        ),
    ):
        edited = edited.replace(old, new)
    source.write_text(edited)
    assert main(["man", "--check"]) == 1
    said = capsys.readouterr().out
    assert "is out of date; `retrain man --sync`" in said and source.read_text() == edited
    assert main(["man", "--sync"]) == 0
    mended = source.read_text()
    assert "== hicra ==\nWhy I use it.\n" in mended and "== mine ==\n\nNotes.\n" in mended
    assert "--hicra-alpha" in mended and "--hicra-old" not in mended
    assert "== gone ==" not in mended and main(["man", "--check"]) == 0
    # A topic that is lost comes back.
    source.write_text(mended.replace("== hicra ==", "== mine too ==", 1))
    assert main(["man", "--sync"]) == 0
    assert "--hicra-alpha" in topics_of(source.read_text())["hicra"].text


def test_a_new_key_makes_the_manual_out_of_date(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "version", "print what is installed")
    assert main(["man", "--check"]) == 1
    assert main(["man", "--sync"]) == 0
    assert source.read_text().count("rint what is installed") == 2


def test_every_variable_that_the_package_reads_is_listed() -> None:
    read: set[str] = set()
    for path in (ROOT / "retrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Subscript(value=place, slice=ast.Constant(str(name))) | ast.Compare(
                    ast.Constant(str(name)), _, [place]
                ):
                    pass
                case ast.Call(
                    ast.Attribute(place, "get" | "setdefault"), [ast.Constant(str(name)), *_]
                ):
                    pass
                case _:
                    continue
            if ast.unparse(place) == "os.environ":
                read.add(name)
    libraries = {
        "RETRAIN_<SECTION>_<KEY>",
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "WANDB_API_KEY",
        "TINKER_API_KEY",
        "OPENAI_API_KEY",
        "NO_COLOR",
    }
    listed = topics_of(read_source())["variables"].text
    assert len(read) >= 8 and not {name for name in read | libraries if name not in listed}


def test_the_quickstarts_commands_are_commands() -> None:
    lines = re.findall(
        r"^  (retrain\b.*)$", topics_of(read_source())["quickstart"].text, re.MULTILINE
    )
    assert len(lines) >= 8 and not [problem for line in lines if (problem := check_command(line))]


def test_a_terminal_gets_a_pager_and_a_pipe_the_text() -> None:
    command = [sys.executable, "-m", "retrain", "man", "quickstart"]
    environment = os.environ | {"PAGER": "sed s/^/paged:/", "TERM": "xterm"}
    main_side, terminal = pty.openpty()
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    while chunk := _read(main_side):
        shown += chunk
    assert process.wait(20) == 0 and shown.startswith(b"paged:== quickstart ==")
    piped = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert piped.startswith("== quickstart ==")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed
        return b""


def test_help_ends_with_every_key_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    keys = shown.partition("\nKeys:\n")[2]
    assert all(re.search(rf"(^|\s){key.name}(\s|$)", keys) for key in all_keys())
    assert "`retrain help KEY`" in shown.splitlines()[-3]
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize(
    ("name", "shown"),
    [("cispo", "CISPO (arXiv 2506.13585) is a value of:\n\n[algorithm]\n  --algorithm-mode"),
     ("tis", "tis is a value of:\n\n[loss]\n  --loss-correction"), ("files", "summary.json"),
     ("lr", "--lr  (lr = 4e-05)"), ("training.lr", "--lr  (lr = 4e-05)"), ("epochs", "--max-steps"),
    ("hicra", "--hicra-alpha"),
     ("explain", "Usage: retrain explain"), ("backend", "--options zmq_port=VALUE, for prime_rl")],
)  # fmt: skip
def test_help_answers_a_key_a_value_a_section_a_command_and_another_trainers_name(
    name: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", name]) == 0
    assert shown in capsys.readouterr().out


def test_help_for_an_unknown_name_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "inti"]) == 2
    assert "did you mean `retrain help init`?" in capsys.readouterr().err
    assert main(["help", "gamma"]) == 2
    assert "there is no critic" in capsys.readouterr().err
    # A key has a similar name, and the sentence is no question for that.
    assert main(["help", "do_sample"]) == 2
    assert capsys.readouterr().err.endswith("--min-p shape it.\n")


def test_the_quickstarts_keys_make_a_prompt_that_asks_for_a_box(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    lines = re.findall(
        r"^  (\[data\]|\w+ = .*)$", topics_of(read_source())["quickstart"].text, re.MULTILINE
    )
    (tmp_path / "own.toml").write_text("\n".join(lines))
    config = load_config(tmp_path / "own.toml")
    (example,) = load_examples(config).examples
    assert (
        messages_of(example, config.data)[-1]["content"]
        == "1+1=?\n\nPut the final answer in \\boxed{}."
    )
