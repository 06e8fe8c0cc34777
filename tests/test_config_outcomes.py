"""Keys that are declared and were without effect: each is used, refused, or said to be unused."""

import errno
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import plan_campaign
from retrain.campaign.runner import AutoSqueeze
from retrain.config import (
    config_from_mapping,
    unused_keys,
    with_drawn_seed,
)
from retrain.run.notes import preflight_lines

CAMPAIGN: dict[str, Any] = {"campaign": {"seeds": [1, 2]}}


def test_squeeze_keys_that_do_nothing_in_a_campaign_are_said_to_be_unused() -> None:
    squeeze = {"adapter_path": "a", "compress_to": 4, "evaluate": True}
    said = "\n".join(unused_keys(config_from_mapping(CAMPAIGN | {"squeeze": squeeze})))
    assert (
        '[squeeze] adapter_path = "a" has no effect: a campaign squeezes the adapter of its own'
        " first run." in said
    )
    assert all(f"[squeeze] {name} = " in said for name in ("compress_to", "evaluate"))
    with_output = "\n".join(
        unused_keys(config_from_mapping(CAMPAIGN | {"squeeze": squeeze | {"output_path": "out"}}))
    )
    assert "compress_to" not in with_output and "evaluate" not in with_output


@pytest.mark.parametrize(
    "other",
    [
        {"backend": {"backend": "tinker"}},
        {"inference": {"engine": "vllm", "url": "http://127.0.0.1:1"}},
        {"planning": {"detector": "semantic"}},
        {"backend": {"backend": "tinker"}, "algorithm": {"uncertainty_kind": "shannon_entropy"}},
        {"training": {"group_size": 1}},
    ],
)
def test_a_squeeze_job_is_not_refused_because_of_what_it_does_not_use(
    other: dict[str, Any],
) -> None:
    assert config_from_mapping({"squeeze": {"adapter_path": "a"}} | other).kind == "squeeze"


def test_a_drawn_seed_is_said_at_the_start() -> None:
    config = with_drawn_seed(config_from_mapping({}))
    assert f"Drawn: training.seed = {config.training.seed}" in preflight_lines(config)


def test_code_that_comes_with_a_model_is_named_at_the_start() -> None:
    config = config_from_mapping({"model": {"model": "some/model", "trust_remote_code": True}})
    assert (
        "[model] trust_remote_code = true: Python code that comes with some/model runs as this"
        " user." in preflight_lines(config)
    )
    assert not any(
        "trust_remote_code = true" in line for line in preflight_lines(config_from_mapping({}))
    )


def test_auto_squeeze_takes_the_next_run_where_the_first_is_untrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain import squeeze
    from retrain.errors import UntrainedAdapter

    config = config_from_mapping(CAMPAIGN | {"squeeze": {"rule": "min"}})
    plan = plan_campaign(config, tmp_path)
    manifest = Manifest.of_plan(plan, datetime.now())
    tried: list[str] = []

    def analyzed(config: Any, adapter: Path, **_: Any) -> Any:
        tried.append(adapter.parent.parent.name)
        if len(tried) == 1:
            raise UntrainedAdapter("untrained.")
        return SimpleNamespace(
            analysis=SimpleNamespace(summary=lambda: None),
            lines=list,
            to_json=lambda: {"recommended_rank": 1},
        )

    monkeypatch.setattr(squeeze, "squeeze_adapter", analyzed)
    said: list[str] = []
    auto = AutoSqueeze(plan, manifest, said.append)
    auto.look()
    first, second, *later = [run.name for run in plan.runs]
    for name in (second, first, *later):  # the plan's order counts
        manifest.ended(name, Status.DONE)
        auto.look()
    assert tried == [run.name for run in plan.runs[:2]]
    assert manifest.squeeze == {"recommended_rank": 1}
    assert any("uses the next run" in line for line in said)


def test_auto_squeeze_stops_no_run_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain import squeeze

    def analyzed(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(squeeze, "squeeze_adapter", analyzed)
    plan = plan_campaign(config_from_mapping(CAMPAIGN | {"squeeze": {"rule": "min"}}), tmp_path)
    said: list[str] = []
    manifest = Manifest.of_plan(plan, datetime.now())
    manifest.ended(plan.runs[0].name, Status.DONE)
    AutoSqueeze(plan, manifest, said.append).look()
    assert said[-1].endswith("the campaign continues: [Errno 28] No space left on device")
