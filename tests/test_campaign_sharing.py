"""What runs of a campaign that follow each other in one process need only once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from retrain.campaign import plan_campaign
from retrain.campaign.launch import InProcess
from retrain.campaign.manifest import Status
from retrain.campaign.plan import CampaignRun
from retrain.config import config_from_mapping, dump_toml
from retrain.model.text import LAB_MODEL
from retrain.run.loop import train
from retrain.run.sharing import shared, shared_parts
from tests.campaigns import sections
from tests.runs import timeless


def runs_of(folder: Path, **others: Any) -> list[CampaignRun]:
    config = config_from_mapping(sections(folder, others.pop("campaign", {}), **others))
    return list(plan_campaign(config, folder).runs)


def the_same(folder: Path, other: Path) -> None:
    assert timeless(folder / "metrics.jsonl") == timeless(other / "metrics.jsonl"), folder.name
    for file in ("evaluation.jsonl", "checkpoints/final/adapter_model.safetensors"):
        assert (folder / file).read_bytes() == (other / file).read_bytes(), (folder.name, file)


@pytest.mark.slow
def test_a_model_folder_that_changes_is_read_anew(tmp_path: Path) -> None:
    """Its weights, and the evaluation before step 0, are those of the run alone."""
    model = shutil.copytree(LAB_MODEL, tmp_path / "model") / "model.safetensors"
    campaign = {
        "conditions": [
            {"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "maxrl")
        ],
        "seeds": [1],
        "max_steps": 1,
    }
    settings = {
        "model": {"model": str(model.parent)},
        "reward": {"type": "match"},
        "evaluation": {"at_start": True, "max_examples": 8},
    }
    runs = runs_of(tmp_path / "together", campaign=campaign, **settings)
    launcher = InProcess()
    try:
        assert launcher.start(runs[0], 0).poll().status is Status.DONE
        half = {name: 0.5 * weight for name, weight in load_file(model).items()}
        save_file(half, model, metadata={"format": "pt"})
        assert launcher.start(runs[1], 0).poll().status is Status.DONE
    finally:
        launcher.close()
    alone = runs_of(tmp_path / "alone", campaign=campaign, **settings)[1]
    train(alone.config, quiet=True)
    the_same(runs[1].folder, alone.folder)


def test_parts_are_kept_for_an_equal_key_while_they_are_shared() -> None:
    assert shared("key", list) is not shared("key", list)
    with shared_parts():
        kept = shared("key", list)
        assert shared("key", list) is kept
        assert shared("other", list) is not kept
        assert shared(None, list) is not shared(None, list)
    assert shared("key", list) is not kept


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    from retrain.data.prompts import examples_key

    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    config = config_from_mapping({"data": {"source": str(file)}})
    key = examples_key(config, "train")
    assert key is not None and key == examples_key(config, "train")
    assert key != examples_key(config, "heldout")
    file.write_text(file.read_text() * 2)
    assert examples_key(config, "train") != key
    own = config_from_mapping({"data": {"source": "mine.examples"}})
    assert examples_key(own, "train") is None
    assert dump_toml(own)
