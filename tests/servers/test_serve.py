"""The commands that `retrain serve` prints start servers, as they are."""

from pathlib import Path

import httpx
import pytest
from real_servers import LAB, Printed, ended

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


def complete(server: Printed, **body: object) -> dict[str, object]:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"max_tokens": 4} | body, timeout=120, trust_env=False
    )
    (choice,) = answer.raise_for_status().json()["choices"]
    return dict(choice)


def test_the_printed_vllm_command_serves_what_a_run_needs(printed_vllm: Printed) -> None:
    server = printed_vllm
    assert "--max-lora-rank 16" in server.printed and "--max-model-len 512" in server.printed
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        (model,) = client.get("/v1/models").json()["data"]
        missing = client.post(
            "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"}
        )
        assert client.post("/reset_prefix_cache").status_code == 200
    assert (
        model["max_model_len"] == 512 and missing.status_code == 404 and "/nowhere" in missing.text
    ), "it looked for the adapter"
    choice = complete(
        server,
        model=model["id"],
        prompt=[40, 41, 42],
        temperature=0.5,
        logprobs=0,
        return_token_ids=True,
    )
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0  # type: ignore[arg-type, index]


def test_the_printed_mlx_command_serves_what_a_run_needs(tmp_path: Path) -> None:
    with ended(Printed("mlx", tmp_path)) as server:
        choice = complete(server, model=str(LAB), prompt="12+7=", temperature=0.5, logprobs=True)  # type: ignore[arg-type]
        assert all({"id", "logprob"} <= token.keys() for token in choice["logprobs"]["content"])  # type: ignore[index]
