"""`retrain export`: what it writes is the policy that the run evaluated, loaded by peft and by
transformers alone.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from runs import small, small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.cli.main import main
from retrain.config import load_config
from retrain.model.text import LAB_MODEL
from retrain.records.checkpoint import MANIFEST, STATE, commit_folder
from retrain.records.disk import TEMPORARY
from retrain.run.parts import load_parts
from retrain.squeeze.adapter import CONFIG_FILE

SECRET = "sk-abcdefghijklmnopqrstuvwx"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    evaluated = {"at_start": True, "at_end": True, "max_examples": 4}
    # a rate at which the adapter changes greedy answers
    training = {"lr": 2e-2, "save_every": 2}
    small_run(small(folder, evaluation=evaluated, training=training), quiet=True)
    return folder


def copied(run: Path, folder: Path, old: str = "", new: str = "") -> Path:
    """A copy of the run whose config.toml has `new` in the place of `old`."""
    config = shutil.copytree(run, folder) / "config.toml"
    text = config.read_text(encoding="utf-8")
    assert old in text
    config.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def exported(run: Path, *options: str) -> tuple[Any, Any]:
    """The model and the tokenizer of an export, read by peft and transformers."""
    folder = run.parent / f"run-{'merged' if options else 'adapter'}"
    shutil.rmtree(folder, ignore_errors=True)
    assert main(["export", str(run), *options]) == 0
    if options:
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path
        assert base is not None
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def test_adapter_and_merged_model_are_the_policy_that_the_run_evaluated(run: Path) -> None:
    parts = load_parts(load_config(run / "config.toml", [], {}), None, lambda _: None, learns=False)
    backend: Any = parts.backend
    backend.load(run / "checkpoints/step_000004")
    own = backend._weights.peft_model
    (adapter, tokenizer), (merged, other) = exported(run), exported(run, "--merged")
    chat = [{"role": "user", "content": "12 + 30 + 5 = ?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == other.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    greedy = {"max_new_tokens": 24, "do_sample": False}
    answer, logits = own.generate(input_ids=ids, **greedy), own(input_ids=ids).logits
    with own.disable_adapter():
        assert (own(input_ids=ids).logits - logits).abs().max() > 1e-2  # the adapter does something
    settings = json.loads((run.parent / "run-merged/config.json").read_text())
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"], "for MLX-LM"
    modes = {file.stat().st_mode for file in (run.parent / "run-merged").iterdir()}
    assert len(modes) == 1, "who may read the tokenizer may read the weights"
    for model in (adapter, merged):
        assert torch.equal(model.generate(input_ids=ids, **greedy), answer)
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=1e-4)
    parts.close()


def test_card_says_what_was_measured_and_how_to_train_it_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    prompts = 'system_prompt = ""', f'system_prompt = "{SECRET}"'
    resumed = copied(run, run.parent / "resumed", 'from = ""', 'from = "logs/first"')
    assert main(["export", str(copied(resumed, run.parent / "secret", *prompts))]) == 0
    folder = run.parent / "secret-adapter"
    card = (folder / "README.md").read_text(encoding="utf-8")
    after = json.loads((run / "summary.json").read_text())["evaluation"]["after"]
    low, high = after["interval"]
    assert f"| 4 | {after['pass@1']:.1%} [{low:.1%}, {high:.1%}] | 4 |" in card
    assert json.loads((run / "checkpoints/final/manifest.json").read_text())["config_hash"] in card
    assert "retrain retrain.toml" in card
    again = load_config(folder / "retrain.toml", [], {})
    assert (again.training.lr, again.resume.from_) == (2e-2, "")
    assert not [path for path in folder.iterdir() if SECRET.encode() in path.read_bytes()]


def test_what_cannot_be_exported_is_refused_in_one_sentence_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    homeless = copied(run, tmp_path / "homeless", 'model = "lab"', 'model = "./gone"')
    run, damaged, fresh = (copied(run, tmp_path / name) for name in ("run", "damaged", "fresh"))
    with (damaged / "checkpoints/step_000004/adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    shutil.rmtree(fresh / "checkpoints")
    cases = [
        ([str(tmp_path)], 2, "holds no run of retrain"),
        ([str(fresh)], 1, "has no checkpoint yet"),
        ([str(damaged)], 1, "adapter_model.safetensors has"),
        ([str(run), "--checkpoint", "3"], 2, "checkpoints here: 2, 4"),
        ([str(run), "--output", str(damaged)], 2, "is not an empty folder"),
        ([str(homeless), "--merged"], 3, "is not a folder on this machine"),
        ([str(run), "--hub", "me/mine"], 3, "needs a token"),
        (["/"], 2, "/ holds no run of retrain"),
        ([str(run), "--output", str(run / "config.toml" / "in")], 2, "lies in a file"),
        ([str(run), "--output", str(run / "checkpoints" / "in")], 2, "deletes when it starts"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, code, sentence in cases:
        assert main(["export", *arguments]) == code, arguments
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1, error
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("retrain.model.hub.why_unreachable", lambda: "no network")
    assert main(["export", str(run), "--hub", "me/mine"]) == 3
    assert "me/mine: no network. Export without --hub" in capsys.readouterr().err
    monkeypatch.setattr("retrain.model.hub.why_unreachable", lambda: "")
    assert main(["export", str(run), "--hub", "me/mine"]) == 2
    assert "Add --merged" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def sealed(folder: Path, change: Callable[[Path], object]) -> None:
    """Change a checkpoint and give it a manifest that matches, as whoever sends a run can."""
    manifest = json.loads((folder / MANIFEST).read_text())
    source = folder.rename(folder.with_name("source"))
    change(source)
    (source / MANIFEST).unlink()
    commit_folder(
        folder,
        lambda aside: [shutil.copy(path, aside) for path in source.iterdir()] and None,
        step=manifest["step"],
        config_hash=manifest["config_hash"],
    )


def with_setting(name: str, value: object) -> Any:
    def change(folder: Path) -> None:
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (with_setting("target_modules", ["q_proj"]), 2, "no place for base_model.model"),
        (with_setting("megatron_config", {"a": 1}), 2, "does not fit its base model"),
        (lambda folder: (folder / STATE).unlink(), 1, f"{STATE} is missing"),
    ],
)
def test_a_foreign_checkpoint_that_is_not_the_bases_is_refused(
    run: Path, tmp_path: Path, change: Any, code: int, sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Not merged in part, which would be other weights."""
    foreign = copied(run, tmp_path / "run")
    sealed(foreign / "checkpoints/step_000004", change)
    assert main(["export", str(foreign), "--merged"]) == code
    error = capsys.readouterr().err
    assert sentence in error and "bug in retrain" not in error
    assert not (tmp_path / "run-merged").exists()


def test_a_manifest_that_is_a_pipe_does_not_hang(run: Path, tmp_path: Path) -> None:
    foreign = copied(run, tmp_path / "run")
    manifest = foreign / "checkpoints/step_000004" / MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    assert main(["export", str(foreign)]) == 1


def test_a_link_to_a_folder_stays_and_what_it_names_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in (("empty", tmp_path / "disk"), ("dangling", tmp_path / "new")):
        (tmp_path / "disk").mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
        assert main(["export", str(run), "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).is_symlink() and (target / "README.md").is_file()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["export", str(run), "--output", "."]) == 2
    assert "is the current folder" in capsys.readouterr().err
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Exception("No space left on device (os error 28)"), 3),  # what tokenizers raise
        (OSError(errno.ENOSPC, "No space left on device", "the source of a copy"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_export_that_is_cut_short_leaves_nothing(
    run: Path, tmp_path: Path, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    target = tmp_path / "adapter"
    assert main(["export", str(run), "--output", str(target)]) == code
    assert code == 130 or f"{target} is not writable (No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_folder_can_be_made_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--output", "/proc/x/adapter"]) == 3
    assert "/proc/x/adapter is not writable" in capsys.readouterr().err


def test_the_card_names_no_folder_of_this_machine(run: Path, tmp_path: Path) -> None:
    base = shutil.copytree(LAB_MODEL, tmp_path / "private" / "base")
    models = 'model = "lab"', f'model = "{base}"'
    assert main(["export", str(copied(run, tmp_path / "run", *models))]) == 0
    card = (tmp_path / "run-adapter/README.md").read_text(encoding="utf-8")
    assert "private" not in card and '`"base"`' in card


def test_the_card_says_which_settings_moved(run: Path) -> None:
    moved = '[schedule]\n"training.lr" = [[0, 1e-2], [4, 1e-3]]\n'
    copy = copied(run, run.parent / "moved", "[schedule]\n", moved)
    assert main(["export", str(copy)]) == 0
    card = (copy.with_name("moved-adapter") / "README.md").read_text(encoding="utf-8")
    assert "| `training.lr` | `0.02`, moved by [schedule] |" in card
    assert "| `training.temperature` | `1.0` |" in card


def test_a_label_that_looks_like_a_secret_is_left_out_of_what_is_trained_again(
    run: Path, tmp_path: Path
) -> None:
    secret = f"sk-{'a' * 20}"
    labels = '\nlabel = ""', f'\nlabel = "{secret}"'
    foreign = copied(run, tmp_path / "run", *labels)
    (foreign / "summary.json").write_text('{"condition": "***"}')
    assert main(["export", str(foreign)]) == 0
    written = tmp_path / "run-adapter/retrain.toml"
    assert load_config(written, [], {}).logging.label == ""
    assert secret not in written.read_text(encoding="utf-8")


def test_a_models_own_code_is_not_run_unless_it_is_trusted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = "trust_remote_code = false", "trust_remote_code = true"
    foreign = copied(run, tmp_path / "foreign", *codes)
    assert main(["export", str(foreign)]) == 2
    assert "[model] trust_remote_code = true (of lab)" in capsys.readouterr().err
    assert not (tmp_path / "foreign-adapter").exists()
    assert main(["export", str(foreign), "--trust"]) == 0
