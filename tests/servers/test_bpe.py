"""Models of merged bytes with a tied head on MLX-LM, which takes prompts as text: what the lab's
model, of single bytes and with a head of its own, cannot show. Random weights, in two precisions.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import faulty_proxy
from real_servers import RealServer, started
from runs import lines, small
from tokenizers_for_tests import byte_level

from retrain import train
from retrain.errors import RunFailed

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """It computes in the precision of the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("bpe"), byte_level()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        # Sharper than 0.02, at which every token is as probable as any other.
        initializer_range=0.2,
        **sizes,
        **heads,
    )
    LlamaForCausalLM(config).to(getattr(torch, request.param)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(settings))
    with started("mlx", (folder, ())) as (one,):
        yield one


def through(folder: Path, server: RealServer, url: str = "") -> Any:
    precision = json.loads((server.model / "config.json").read_text())["dtype"]
    model = {"model": str(server.model), "dtype": {"float32": "fp32"}.get(precision, "bf16")}
    return small(
        folder,
        model=model,
        inference={"engine": "mlx", "url": url or server.url},
        training={"temperature": 0.8, "max_tokens": 16},
    )


def test_steps_are_on_policy(tmp_path: Path, server: RealServer) -> None:
    config = through(tmp_path, server)
    run = train(config, quiet=True)
    gate = json.loads((run.folder / "environment.json").read_text())["parity_gate"]
    records = run.records()
    ratios = [ratio for one in records for ratio in (one.ratio_max, one.ratio_min) if ratio]
    largest = max(abs(math.log(ratio)) for ratio in ratios)
    print(f"\nlargest difference: gate {gate['max_difference']:.1e}, steps {largest:.1e} nats")
    assert len(records) == 4
    assert largest < {"fp32": 1e-3, "bf16": 0.3}[config.model.dtype]
    assert gate["adapter_effect"] > 0


def test_a_server_that_draws_every_request_with_one_seed_is_named(
    tmp_path: Path, server: RealServer
) -> None:
    """Each completion is a request of its own to this server, so that a group's would be equal and
    nothing would be learned.
    """

    def seeded(path: str, request: bytes) -> bytes:
        if not path.endswith("/completions"):
            return request
        return json.dumps(json.loads(request) | {"seed": 7}).encode()

    with faulty_proxy(server.url) as (url, traffic):
        traffic.asked = seeded
        with pytest.raises(RunFailed, match="completions of one prompt are identical") as caught:
            train(through(tmp_path, server, url), quiet=True)
    print(f"\n{caught.value}")
    assert not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path / "metrics.jsonl")
