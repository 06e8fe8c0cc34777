"""The vllm engine against vLLM's CPU build: parity, learning beside the local engine, stale caches,
wrong servers, servers that die.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from faulty_proxy import faulty_proxy
from quoted import is_quoted
from real_servers import LAB, RealServer, await_steps, largest_difference, started
from runs import lines, small
from safetensors.numpy import load_file, save_file

from retrain import train
from retrain.cli.main import main
from retrain.config import dump_toml
from retrain.errors import RunFailed, ServerFailure
from retrain.inference_engine.base import SampleRequest
from retrain.inference_engine.http import Json, Patience, Server
from retrain.inference_engine.served import ServedAdapter
from retrain.inference_engine.vllm import VLLMDialect, VLLMEngine

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

LEARNING: dict[str, Any] = {
    "model": {"lora_rank": 16},
    "reward": {"type": "match"},
    "training": {
        "seed": 0,
        "max_steps": 10,
        "batch_size": 8,
        "group_size": 4,
        "max_tokens": 96,
        "lr": 1e-3,
        "save_every": 50,
    },
}


def permuted(folder: Path) -> Path:
    """The lab model as with another tokenizer: its byte tokens have other ids."""
    folder.mkdir()
    for file in LAB.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(LAB / "model.safetensors")
    order = np.concatenate([np.random.default_rng(0).permutation(256), np.arange(256, 259)])
    for name, value in weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            weights[name] = np.ascontiguousarray(value[order])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Another tokenizer's model, and vLLM's default log-probs, which are the right ones at
    temperature 1.
    """
    model = permuted(tmp_path_factory.mktemp("strange") / "permuted")
    with started("vllm", (model, ("--logprobs-mode", "raw_logprobs"))) as (one,):
        yield one


def served(folder: Path, *urls: str, engine: str = "vllm", **sections: Any) -> Any:
    return small(folder, inference={"engine": engine, "url": list(urls)}, **sections)


def test_ten_steps_learn_as_the_local_engine_does(tmp_path: Path, vllm: RealServer) -> None:
    """Print the table of benchmarks/results/servers-2026-11-26.md."""
    before = served_models(vllm)
    through = train(served(tmp_path / "vllm", vllm.url, **LEARNING), quiet=True).records()
    local = train(small(tmp_path / "local", **LEARNING), quiet=True).records()
    print(
        "\n| step | largest difference, nats | correct, vllm | correct, pytorch | seconds sampling,"
        " vllm | pytorch |"
    )
    print("|---|---|---|---|---|---|")
    for mine, other in zip(through, local, strict=True):
        print(
            f"| {mine.step} | {largest_difference(mine):.1e} | {mine.correct_rate:.1%} |"
            f" {other.correct_rate:.1%} | {mine.time_sample_s:.1f} | {other.time_sample_s:.1f} |"
        )
    assert max(map(largest_difference, through)) < 1e-3
    # Two runs with other noise differ by luck: 0.24 and 0.42 were seen. A reward that is wrong gives
    # 0, and a sampler of another policy differs above.
    assert np.mean([record.correct_rate for record in through[5:]]) > 0.1
    assert served_models(vllm) == before, "no adapter is left behind"


def served_models(server: RealServer) -> list[str]:
    return [
        model["id"]
        for model in httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    ]


# -- engines that are broken on purpose ------------------------------------------------------------


class SameNameAndPath(VLLMDialect):
    """Reloads every version under one name and path, as vLLM's documentation allows; its prefix
    cache does not notice.
    """

    def known(self, adapter: ServedAdapter) -> ServedAdapter:
        folder = adapter.folder.parent / "current"
        folder.mkdir(exist_ok=True)
        if adapter.folder.exists():
            for file in adapter.folder.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
        return ServedAdapter("current", folder)

    async def load(self, server: Server, adapter: ServedAdapter) -> None:
        known = self.known(adapter)
        await server.post(
            "/v1/load_lora_adapter",
            {"lora_name": known.name, "lora_path": str(known.folder), "load_inplace": True},
        )

    async def unload(self, server: Server, adapter: ServedAdapter) -> None:
        return None

    async def adapters(self, server: Server) -> None:  # type: ignore[override]
        return None

    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        return super().call(request, adapter and ServedAdapter("current", adapter.folder), server)


class NewPathInPlace(SameNameAndPath):
    """One name, a path for every version."""

    def known(self, adapter: ServedAdapter) -> ServedAdapter:
        return ServedAdapter("current", adapter.folder)


class BaseModelAlways(VLLMDialect):
    def call(
        self, request: SampleRequest, adapter: ServedAdapter | None, server: Server
    ) -> tuple[str, Json]:
        return super().call(request, None, server)


class StaleVLLM(VLLMEngine):
    dialect_class = SameNameAndPath


class InPlaceVLLM(VLLMEngine):
    dialect_class = NewPathInPlace


class BaseVLLM(VLLMEngine):
    dialect_class = BaseModelAlways


class ImpatientVLLM(VLLMEngine):
    patience = Patience(silent_s=8, attempts=4)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("servers.test_vllm.StaleVLLM", "Parity gate: .* cached prefixes"),
        ("servers.test_vllm.BaseVLLM", "with a trial adapter that changes"),
    ],
    ids=["stale cache", "base model"],
)
def test_the_gate_stops_a_broken_reload_rule(
    tmp_path: Path, vllm: RealServer, engine: str, told: str
) -> None:
    with pytest.raises(RunFailed, match=told) as caught:
        train(served(tmp_path / "run", vllm.url, engine=engine), quiet=True)
    print(f"\n{caught.value}")
    assert is_quoted(str(caught.value))
    httpx.post(f"{vllm.url}/v1/unload_lora_adapter", json={"lora_name": "current"}, trust_env=False)


def test_the_gate_passes_the_reload_rules_that_hold(tmp_path: Path, vllm: RealServer) -> None:
    for engine in ("vllm", "servers.test_vllm.InPlaceVLLM"):
        run = train(
            served(
                tmp_path / engine,
                vllm.url,
                engine=engine,
                training={"max_steps": 2, "temperature": 0.7},
            ),
            quiet=True,
        )
        gate = json.loads((run.folder / "environment.json").read_text())["parity_gate"]
        assert gate["max_difference"] < 1e-3 and gate["longest_prompt"] > 2 * 128
    httpx.post(f"{vllm.url}/v1/unload_lora_adapter", json={"lora_name": "current"}, trust_env=False)


def test_the_gate_stops_raw_log_probs(tmp_path: Path, strange: RealServer) -> None:
    with pytest.raises(
        RunFailed,
        match=r"before the temperature, .* start it with --logprobs-mode processed_logprobs",
    ) as caught:
        train(
            served(
                tmp_path,
                strange.url,
                training={"temperature": 0.7},
                model={"model": str(strange.model)},
            ),
            quiet=True,
        )
    print(f"\n{caught.value}")
    assert is_quoted(str(caught.value))


def test_the_gate_stops_a_server_with_another_tokenizer(
    tmp_path: Path, strange: RealServer
) -> None:
    with pytest.raises(RunFailed, match="Parity gate: engine and learner disagree") as caught:
        train(served(tmp_path, strange.url), quiet=True)
    print(f"\n{caught.value}")


def test_of_two_servers_the_one_with_another_model_is_named(
    tmp_path: Path, vllm: RealServer, strange: RealServer
) -> None:
    """Its completions are whole, and their tokens and log-probs are those of other weights."""
    told = f"^Parity gate, at {strange.url} alone of 2 servers: engine and learner disagree"
    with pytest.raises(RunFailed, match=told) as caught:
        train(served(tmp_path, vllm.url, strange.url), quiet=True)
    print(f"\n{caught.value}")
    assert is_quoted(str(caught.value))


def test_an_adapter_where_the_server_does_not_see_it_is_told_with_its_path(
    tmp_path: Path, vllm: RealServer
) -> None:
    """A server in a container or on another machine, to which no disk is shared. Its own words must
    be understood.
    """
    with faulty_proxy(vllm.url) as (url, traffic):
        traffic.asked = lambda _, body: body.replace(str(tmp_path).encode(), b"/not/mounted")
        with pytest.raises(
            ServerFailure,
            match=rf"cannot read the adapter in {tmp_path}/.*\[inference\] adapter_dir",
        ) as caught:
            train(served(tmp_path, url), quiet=True)
    print(f"\n{caught.value}")
    assert is_quoted(str(caught.value))


def test_answers_that_are_damaged_on_their_way_are_drawn_again_and_not_learned_from(
    tmp_path: Path, vllm: RealServer
) -> None:
    """One cut in half, one with a log-prob of nothing, one with a token too few."""
    damages: dict[int, Callable[[bytes], bytes]] = {
        21: lambda answer: answer[: len(answer) // 2],
        24: lambda answer: re.sub(rb'("token_logprobs":\[)[^,\]]+', rb"\1null", answer),
        27: lambda answer: re.sub(rb'("token_ids":\[)\d+,', rb"\1", answer),
    }
    answers: list[int] = []

    def damaged(path: str, answer: bytes) -> bytes:
        if not path.endswith("/completions"):
            return answer
        answers.append(len(answer))
        return damages.pop(len(answers), bytes)(answer)

    with faulty_proxy(vllm.url) as (url, traffic):
        traffic.told = damaged
        run = train(served(tmp_path, url), quiet=True)
    assert not damages and max(map(largest_difference, run.records())) < 1e-3
    drawn = lines(run.folder / "emergence" / "generations.jsonl")
    assert len(drawn) == 4 * 2 * 4
    # The gate asks the same whatever happens, and each request of the run is of four completions.
    print(f"\n{len(answers)} answers for {len(drawn)} completions")


def test_a_service_of_text_or_of_chat_alone_is_evaluated_as_the_local_engine_is(
    tmp_path: Path, vllm: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedily, so that both write the same but where two tokens are equally probable to the last
    digits.
    """
    local, *others = [
        evaluated(tmp_path / name, vllm, name) for name in ("local", "text_alone", "chat_alone")
    ]
    assert "".join(capsys.readouterr()).count("encodes it again to count its tokens") == 2
    for answers in others:
        same = [mine == other for mine, other in zip(answers, local, strict=True)]
        print(f"\n{sum(same)} of {len(same)} greedy completions are equal")
        assert sum(same) >= 14


def evaluated(folder: Path, server: RealServer, way: str) -> list[tuple[str, int]]:
    """(completion, number of tokens) of 16 problems, by the local engine or through a proxy of a
    limited service.
    """
    folder.mkdir()
    evaluation = {"max_examples": 16, "samples": 1, "temperature": 0.0, "max_tokens": 64}
    with faulty_proxy(server.url) as (url, traffic):
        traffic.text_alone, traffic.chat_alone = way == "text_alone", way == "chat_alone"
        engine = "pytorch" if way == "local" else "openai"
        (folder / "run.toml").write_text(
            dump_toml(
                served(folder, url, engine=engine, reward={"type": "match"}, evaluation=evaluation)
            )
        )
        assert main(["eval", str(folder / "run.toml"), "--output", str(folder / "answers")]) == 0
    return [
        (line["completion"], line["num_tokens"])
        for line in lines(folder / "answers" / "samples.jsonl")
    ]


# -- servers that die ------------------------------------------------------------------------------


def test_a_run_outlives_one_of_two_servers(
    tmp_path: Path, vllm: RealServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one is the first behind a proxy, which dies."""
    with faulty_proxy(vllm.url) as (url, traffic):

        def die() -> None:
            await_steps(tmp_path, 1)
            traffic.dead = True

        threading.Thread(target=die, daemon=True).start()
        run = train(
            served(
                tmp_path,
                vllm.url,
                url,
                engine="servers.test_vllm.ImpatientVLLM",
                training={"max_steps": 6},
            )
        )
    said = [line for line in capsys.readouterr().out.splitlines() if "servers left" in line]
    print(said)
    assert run.summary.steps == 6 and len(said) == 1 and url in said[0]


def test_a_run_waits_for_its_server_that_stands_still_and_that_is_started_again(
    tmp_path: Path,
) -> None:
    """Both within one run, which stays on policy."""
    with started("vllm") as (server,):

        def disturb() -> None:
            await_steps(tmp_path, 1)
            os.killpg(server.process.pid, signal.SIGSTOP)
            threading.Event().wait(5)
            os.killpg(server.process.pid, signal.SIGCONT)
            await_steps(tmp_path, 3)
            server.kill()
            server.start(server.command)

        threading.Thread(target=disturb, daemon=True).start()
        run = train(served(tmp_path, server.url, training={"max_steps": 8}), quiet=True)
        records = run.records()
    assert run.summary.steps == 8 and max(map(largest_difference, records)) < 1e-3
    # It answered again within a step, which therefore took long.
    assert max(record.step_time_s or 0 for record in records) > 5


def test_a_killed_server_costs_nothing_and_the_run_resumes_at_another_port(
    tmp_path: Path, vllm: RealServer, printed_vllm: RealServer
) -> None:
    """Its engine dies first, as vLLM's did of prompt_logprobs beside LoRA."""
    config = {"engine": "servers.test_vllm.ImpatientVLLM"}
    printed_vllm.wait()

    def kill_the_engine() -> None:
        await_steps(tmp_path, 3)
        with suppress(httpx.HTTPError):
            (model,) = httpx.get(f"{printed_vllm.url}/v1/models", trust_env=False).json()["data"][
                :1
            ]
            body = {
                "model": model["id"],
                "prompt": [1, 2, 3],
                "max_tokens": 1,
                "prompt_logprobs": 0,
            }
            httpx.post(f"{printed_vllm.url}/v1/completions", json=body, timeout=30, trust_env=False)
        printed_vllm.kill()

    threading.Thread(target=kill_the_engine, daemon=True).start()
    with pytest.raises(
        ServerFailure,
        match=(
            r"does not answer .* The run is saved after \d+ steps: continue with `retrain"
            rf" {tmp_path}/config.toml --resume {tmp_path}`"
        ),
    ) as caught:
        train(
            served(
                tmp_path,
                printed_vllm.url,
                training={"max_steps": 1000, "save_every": 1000},
                **config,
            ),
            quiet=True,
        )
    print(f"\n{caught.value}")
    done = len(lines(tmp_path / "metrics.jsonl"))
    run = train(
        served(
            tmp_path,
            vllm.url,
            resume={"from": str(tmp_path)},
            training={"max_steps": done + 2},
            **config,
        ),
        quiet=True,
    )
    assert done >= 3 and [record.step for record in run.records()] == list(range(done + 2))
