"""The same campaign through a local Ray cluster."""

import contextlib
import re
import socket
import time
from pathlib import Path
from tempfile import mkdtemp

import pytest

from retrain.campaign.launch import gpu_share
from retrain.config import config_from_mapping
from retrain.config.schema import Campaign
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.install import install_hint
from tests.campaigns import sections


def test_a_run_takes_whole_gpus_or_a_part_of_one() -> None:
    assert gpu_share(Campaign(devices_per_run=2)) == 2
    assert gpu_share(Campaign(workers_per_device=4)) == 0.25
    with pytest.raises(ConfigurationError, match="Leave either key at 1"):
        gpu_share(Campaign(devices_per_run=2, workers_per_device=2))


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from retrain.campaign import run_campaign

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match=re.escape(install_hint("ray"))):
        run_campaign(config_from_mapping(sections(tmp_path / "c", {"launcher": "ray"})), quiet=True)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_not_there_is_said_at_once(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from retrain.campaign import run_campaign

    with socket.socket() as listener:  # bound, and nobody listens
        listener.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(
            EnvironmentFailure, match=f"ray_address = '{address}': no Ray cluster answers .*refused"
        ):
            run_campaign(
                config_from_mapping(
                    sections(tmp_path / "c", {"launcher": "ray", "ray_address": address})
                ),
                quiet=True,
            )
    assert time.monotonic() - began < 30
    assert not (tmp_path / "c").exists()


def processes_that_name(text: str) -> list[str]:
    """Command lines, where the kernel tells them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if text in line]


@pytest.mark.slow
def test_a_local_cluster_runs_the_campaign_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from retrain.campaign import Manifest, Status, launch, run_campaign
    from retrain.errors import RunFailed

    made: list[str] = []
    monkeypatch.setattr(
        launch, "mkdtemp", lambda **options: made.append(mkdtemp(**options)) or made[-1]
    )
    monkeypatch.setenv(
        "RAY_ADDRESS", "127.0.0.1:1"
    )  # a cluster of someone else, which a local one has nothing to do with
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    good = {"advantage_mode": "grpo", "transform_mode": "none"}
    broken = good | {"label": "broken", "lora.init_from": "nowhere"}
    campaign = {"launcher": "ray", "seeds": [1], "max_steps": 1, "conditions": [good, broken]}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFailed, match=r"broken_s1 \(failed"):
        run_campaign(config_from_mapping(sections(Path("logs/c"), campaign)), quiet=True)
    done, failed = Manifest.read(Path("logs/c")).runs
    assert (done.status, failed.status) == (Status.DONE, Status.FAILED)
    assert failed.reason and 'init_from = "nowhere"' in failed.reason
    assert (tmp_path / "logs/c/runs/grpo+none_s1/summary.json").is_file()

    from ray._common.usage.usage_lib import usage_stats_enabled

    assert not usage_stats_enabled()
    (folder,) = made
    assert not Path(folder).exists()
    deadline = time.monotonic() + 10
    while left := processes_that_name(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
