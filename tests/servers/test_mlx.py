"""The mlx engine against a real MLX-LM server on the CPU with the lab model. `make test-servers` runs this."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
from served import free_port, printed_command, running

from retrain import train
from retrain.config import TrainConfig, config_from_mapping, dump_toml
from retrain.errors import RunFailed
from retrain.inference_engine.http import Server
from retrain.inference_engine.mlx import MLXDialect, MLXEngine
from retrain.inference_engine.served import ServedAdapter

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, address = tmp_path_factory.mktemp("mlx"), f"http://127.0.0.1:{free_port()}"
    config = folder / "lab.toml"
    config.write_text(dump_toml(lab_run(folder, address)))
    with running(printed_command("mlx", config), address, folder / "server.log"):
        yield address


def lab_run(folder: Path, url: str, **inference: Any) -> TrainConfig:
    """Ten steps at a temperature at which raw log-probs are not those of the policy."""
    return config_from_mapping(
        {
            "model": {"model": "lab", "lora_rank": 16},
            "data": {"source": "lab"},
            "reward": {"type": "match"},
            "algorithm": {"advantage_mode": "maxrl", "transform_mode": "none"},
            "training": {"seed": 0, "max_steps": 10, "batch_size": 8, "group_size": 4, "max_tokens": 96, "temperature": 0.8, "lr": 1e-3},
            "loss": {"max_grad_norm": 1.0},
            "backend": {"devices": "cpu"},
            "inference": {"engine": "mlx", "url": url} | inference,
            "logging": {"log_dir": str(folder / "run")},
        }
    )


def test_ten_steps_on_policy_with_a_new_adapter_each(url: str, tmp_path: Path) -> None:
    run = train(lab_run(tmp_path, url), quiet=True)
    records = run.metrics()
    assert len(records) == 10
    for record in records:
        assert record.ratio_max is not None and record.ratio_min is not None
        assert max(abs(np.log(record.ratio_max)), abs(np.log(record.ratio_min))) < 1e-3
    gate = json.loads((tmp_path / "run" / "environment.json").read_text())["parity_gate"]
    assert gate["max_difference"] < 1e-3 and gate["adapter_effect"] > 0.01 and gate["longest_prompt"] > 256


class OneFolder(MLXDialect):
    """Gives every version of the adapter in the same folder."""

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        constant = adapter.folder.parent / "constant"
        await super().load(server, ServedAdapter(adapter.name, adapter.folder))
        if not constant.exists():
            (adapter.folder / "mlx").rename(constant)
        else:
            for file in (adapter.folder / "mlx").iterdir():
                file.replace(constant / file.name)
            (adapter.folder / "mlx").rmdir()
        (adapter.folder / "mlx").symlink_to(constant)

    def _completion(self, prompt: str, settings: Any, adapter: ServedAdapter | None = None) -> Any:
        path, body = super()._completion(prompt, settings, adapter)
        if adapter and (adapter.folder.parent / "constant").exists():
            body["adapters"] = str(adapter.folder.parent / "constant")
        return path, body


class StaleMLX(MLXEngine):
    dialect_class = OneFolder


def test_new_weights_in_a_folder_that_the_server_knows_are_stopped_by_the_gate(url: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="Parity gate"):
        train(lab_run(tmp_path, url, engine="test_mlx.StaleMLX"), quiet=True)
