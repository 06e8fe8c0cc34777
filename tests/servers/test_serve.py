"""The commands that `retrain serve` prints start servers, as they are. `make test-servers` runs this; test_mlx.py does so for mlx."""

import sys
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parent))
from served import free_port, printed_command, running

pytestmark = pytest.mark.servers


def test_the_printed_vllm_command_serves_what_a_run_needs(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = tmp_path / "lab.toml"
    config.write_text(
        f'[model]\nmodel = "lab"\nlora_rank = 12\n[training]\nmax_tokens = 64\n[inference]\nurl = "{url}"\n[data]\nsource = "lab"\n'
    )
    command = printed_command("vllm", config)
    assert "--max-lora-rank 16" in command and "--max-model-len 512" in command
    with running(command, url, tmp_path / "server.log"):
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": [40, 41, 42], "max_tokens": 4, "temperature": 0.5, "logprobs": 0, "return_token_ids": True}
        (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"]
        assert model["max_model_len"] == 512 and len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
        loads = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"}).status_code
        assert loads == 404 and httpx.post(f"{url}/reset_prefix_cache").status_code == 200
