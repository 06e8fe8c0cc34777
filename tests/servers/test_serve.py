"""The commands that `retrain serve` prints start servers, as they are."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from real_servers import LAB, RealServer, free_port

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


class Printed(RealServer):
    """Started by what `retrain serve` prints for the lab model at rank 12 and 64 new tokens."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.port, self.log = free_port(), folder / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        config = folder / "lab.toml"
        inference = f'[inference]\nengine = "{engine}"\nurl = "{self.url}"\n'
        config.write_text(f'{inference}[model]\nmodel = "lab"\nlora_rank = 12\n[training]\nmax_tokens = 64\n[data]\nsource = "lab"\n')
        python = Path(os.environ["RETRAIN_SERVERS"]) / engine / "bin" / "python"
        arguments = [sys.executable, "-m", "retrain", "serve", engine, str(config), "--python", str(python)]
        self.command = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", self.command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def complete(self, **body: object) -> dict[str, object]:
        answer = httpx.post(f"{self.url}/v1/completions", json={"max_tokens": 4} | body, timeout=120, trust_env=False)
        (choice,) = answer.raise_for_status().json()["choices"]
        return dict(choice)


def test_the_printed_vllm_command_serves_what_a_run_needs(tmp_path: Path) -> None:
    server = Printed("vllm", tmp_path)
    try:
        assert "--max-lora-rank 16" in server.wait().command and "--max-model-len 512" in server.command  # type: ignore[attr-defined]
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            (model,) = client.get("/v1/models").json()["data"]
            missing = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"})
            assert client.post("/reset_prefix_cache").status_code == 200
        assert model["max_model_len"] == 512 and missing.status_code == 404 and "/nowhere" in missing.text, "it looked for the adapter"
        choice = server.complete(model=model["id"], prompt=[40, 41, 42], temperature=0.5, logprobs=0, return_token_ids=True)
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0  # type: ignore[arg-type, index]
    finally:
        server.kill()


def test_the_printed_mlx_command_serves_what_a_run_needs(tmp_path: Path) -> None:
    server = Printed("mlx", tmp_path)
    try:
        server.wait()
        choice = server.complete(model=str(LAB), prompt="12+7=", temperature=0.5, logprobs=True)
        assert all({"id", "logprob"} <= token.keys() for token in choice["logprobs"]["content"])  # type: ignore[index]
    finally:
        server.kill()
