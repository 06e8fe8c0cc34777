"""A whole run of a truncated policy: what it records, what the gate stops, and which engines are
refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import lines, quiet_run, small

from retrain import train
from retrain.cli.main import main
from retrain.config.needs import refusals
from retrain.errors import ConfigurationError
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.model.memory import predict_memory
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import read_tokens
from retrain.run.notes import notes

TRUNCATED: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "run"
    training = {"max_steps": 2, "batch_size": 3, "temperature": 1.3, **TRUNCATED}
    loss = {"kl_coef": 0.1, "entropy_coef": 0.01}
    more = {"logging": {"tokens_every": 1}, "evaluation": {"at_end": True, "max_examples": 2}}
    config = small(folder, training=training, loss=loss, **more)
    return train(config, quiet=True).folder


def test_every_step_of_a_truncated_run_starts_at_ratio_one(run: Path) -> None:
    for record in lines(run / "metrics.jsonl"):
        assert record["num_datums"] and record["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert (
        json.loads((run / "environment.json").read_text())["parity_gate"]["max_difference"] < 1e-4
    )


def test_the_token_file_holds_how_many_tokens_each_one_was_drawn_from(run: Path) -> None:
    table = read_tokens(RunFolder(run).step_tokens(1))
    assert table.kept is not None and table.kept.dtype == np.int32
    assert table.kept.shape == table.token_ids.shape
    assert 1 == table.kept.min() < table.kept.max() <= 20
    alone = table.kept == 1
    assert (table.logprobs[alone] == 0).all()
    assert table.entropies is not None
    assert (table.entropies[alone] == 0).all()
    assert (table.logprobs[~alone] < 0).all()


def test_inspect_shows_the_kept_count_of_every_token(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run), "--json"]) == 0
    for completion in json.loads(capsys.readouterr().out)["completions"]:
        assert len(completion["kept"]) == len(completion["token_ids"])
        assert min(completion["kept"]) >= 1
    assert main(["inspect", str(run), "--table", "--against", "gtpo"]) == 0
    assert " kept " in capsys.readouterr().out


def test_an_engine_that_cannot_give_kept_sets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = PyTorchEngine.capabilities
    assert declared is not None
    monkeypatch.setattr(PyTorchEngine, "capabilities", replace(declared, kept_set=False))
    with pytest.raises(
        ConfigurationError,
        match=(
            r'\[training\] top_p = 0.9 with engine = "pytorch": the loss is over the kept tokens,'
            r' .* leave it off, or use engine = "pytorch"'
        ),
    ):
        quiet_run(tmp_path / "run", training={"top_p": 0.9})
    monkeypatch.undo()
    without = replace(declared, kept_set=False)
    assert not list(refusals(small(tmp_path), engine=without))
    assert len(list(refusals(small(tmp_path, training=TRUNCATED), engine=without))) == 3


def test_a_run_says_that_it_is_truncated_and_counts_the_memory(tmp_path: Path) -> None:
    whole, cut = small(tmp_path), small(tmp_path, training={"top_p": 0.9}, loss={"kl_coef": 0.1})
    assert not any("kept token" in note for note in notes(whole))
    (note,) = [note for note in notes(cut) if "kept token" in note]
    assert note.startswith("[training] top_p = 0.9: retrain samples and trains")
    assert "whole distribution of [loss] kl_reference" in note
    larger, smaller = (predict_memory(config).turns for config in (cut, whole))
    assert larger[0] > smaller[0] and larger[1] >= smaller[1]
