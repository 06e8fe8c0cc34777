"""Engines on servers, against one in this process that answers as vLLM does: adapters, faults, the
gate, runs that survive a server.
"""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import lines, small
from vllm_double import (
    HASTY,
    HastyVLLM,
    SleepyVLLM,
    VLLMDouble,
    doubles,
    eos_ids,
    first,
    lab,
    scripted,
    slow,
)

from retrain import train
from retrain.cli.main import main
from retrain.config import dump_toml, replaced
from retrain.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Interrupted,
    RetrainError,
    RunFailed,
    ServerFailure,
)
from retrain.inference_engine.base import BASE_MODEL, NoiseKey, SampleRequest, Truncation
from retrain.inference_engine.http import Patience, ServerPool
from retrain.inference_engine.openai import OpenAIEngine
from retrain.inference_engine.served import ServedAdapter
from retrain.inference_engine.vllm import VLLMDialect
from retrain.noise import Stream
from retrain.run.parts import RunParts, load_parts, run_parity_gate
from retrain.types import Completion, FinishReason
from tests.marks import first_of
from tests.quoted import is_quoted
from tests.runs import small_run

WITHOUT_PENALTY = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "logit_bias": None,
}
"""What a server would else take from the model's generation_config."""
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class OneForAll(VLLMDouble):
    """Returns its first completion n times."""

    def complete(self, body: Any, prompt: Any, settings: Any) -> Any:
        status, answer = super().complete(body, prompt, settings)
        return status, {
            "choices": [
                answer["choices"][0] | {"index": index} for index in range(settings.get("n", 1))
            ]
        }


@pytest.fixture
def server() -> Iterator[VLLMDouble]:
    with doubles() as (one,):
        yield one


def served(folder: Path, *urls: str, engine: str = "vllm_double.HastyVLLM", **sections: Any) -> Any:
    """Fewer and shorter completions than in other tests: the server computes in this process
    too.
    """
    inference = {"engine": engine, "url": list(urls)} | sections.pop("inference", {})
    training = {"max_steps": 3, "max_tokens": 6, "group_size": 2} | sections.pop("training", {})
    return small(folder, inference=inference, training=training, **sections)


def engine_of(config: Any, make: type = HastyVLLM, device: str = "cpu") -> Any:
    return make(config, model=lab()._base.model, eos_ids=eos_ids(), device=device)


@contextmanager
def adapted(folder: Path, server: VLLMDouble, make: type = HastyVLLM) -> Iterator[Any]:
    """An engine whose server has the adapter."""
    with closing(engine_of(served(folder, server.url), make)) as engine:
        engine.sync(lab().save_adapter, 0)
        yield engine


@pytest.fixture
def engine(tmp_path: Path, server: VLLMDouble) -> Iterator[Any]:
    with adapted(tmp_path, server) as one:
        yield one


def of(*logprobs: Any) -> dict[str, Any]:
    """Those of the last tokens of six, or of all."""
    return {"token_logprobs": [0.0] * (6 - len(logprobs)) * (len(logprobs) == 1) + [*logprobs]}


def choice(**changes: Any) -> Callable[[str, Any], Any]:
    """An answer of one completion of 6 tokens, with something wrong in it."""
    usual = {"finish_reason": "length", "token_ids": [9] * 6, "logprobs": of(*[0.0] * 6)}
    return first(9, (200, {"choices": [usual | changes]}))


def refusing(message: str, path: str) -> Callable[[str, Any], Any]:
    return first(9, (400, {"error": {"message": message}}), path)


def request(count: int = 2, **changes: Any) -> SampleRequest:
    settings = {"max_tokens": 6, "temperature": 1.0} | changes
    return SampleRequest(
        np.arange(40, 60, dtype=np.int32), count, noise=NoiseKey(0, 0, 0, 0), **settings
    )


EVALUATED = replace(request(1, adapter_slot=BASE_MODEL), noise=NoiseKey(0, Stream.EVALUATION, 0, 0))
MESSAGES = replace(EVALUATED, messages=({"role": "user", "content": "1 + 5"},))


@pytest.fixture(scope="module")
def parts() -> Iterator[RunParts]:
    with closing(
        load_parts(small(Path("nowhere"), training={"temperature": 0.7}), None, lambda line: None)
    ) as loaded:
        yield loaded


def pass_gate(parts: RunParts, config: Any) -> Any:
    """The gate of a run on an engine of `config`, without the run."""
    backend: Any = parts.backend
    own, backend.engine = (
        backend.engine,
        HastyVLLM(config, model=backend._base.model, eos_ids=parts.text.eos_ids, device="cpu"),
    )
    try:
        return run_parity_gate(config, parts, 0)
    finally:
        backend.engine.close()
        backend.engine = own


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_gives_every_version_a_name_and_a_folder_and_leaves_nothing_behind(
    tmp_path: Path, server: VLLMDouble
) -> None:
    folders: list[bool] = []
    server.faults.append(
        lambda path, body: (
            folders.append(Path(body["lora_path"]).is_dir()) if path == LOAD else None
        )
    )
    run = train(served(tmp_path / "run", server.url, training={"temperature": 0.8}), quiet=True)
    assert run.summary.steps == 3
    assert max(record.logprob_diff_mean or 0 for record in run.records()) < 1e-4
    entropies = {record.entropy_mean for record in run.records() if record.num_datums}
    assert entropies and all(0 < (entropy or 0) < 5 for entropy in entropies), "the learner's"
    loads = [body for path, body in server.asked if path == LOAD]
    assert (
        len({body["lora_name"] for body in loads})
        == len({body["lora_path"] for body in loads})
        == len(loads)
        == 3 + 3 + 2
    )
    assert all(folders) and all(set(body) == {"lora_name", "lora_path"} for body in loads)
    unloads = [body["lora_name"] for path, body in server.asked if path == UNLOAD]
    assert unloads == [body["lora_name"] for body in loads] and not server.adapters, (
        "each once, in order; the last one at the end"
    )
    assert not list((tmp_path / "run").glob(".served-*"))
    models = [body["model"] for path, body in server.asked if path == COMPLETIONS]
    assert "base" not in models and len(set(models)) > 4
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["parity_gate"]["adapter_effect"] > 0


def test_requests_hold_what_the_policy_is_and_no_seed(engine: Any, server: VLLMDouble) -> None:
    list(engine.sample([request(2, temperature=0.8)]))
    body = next(body for path, body in server.asked if path == COMPLETIONS)
    wanted = {"n": 2, "temperature": 0.8, "logprobs": 0, "ignore_eos": True}
    uncut = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "return_token_ids": True}
    assert (wanted | uncut | WITHOUT_PENALTY).items() <= body.items()
    assert body["stop_token_ids"] == list(eos_ids()) and "seed" not in body


@pytest.mark.slow
def test_each_of_several_servers_must_pass_the_gate(tmp_path: Path, parts: RunParts) -> None:
    with doubles(2) as servers:
        config = served(tmp_path, *(one.url for one in servers), training={"temperature": 0.7})
        pass_gate(parts, config)
        counts = [
            Counter(len(body["prompt"]) for path, body in one.asked if path == COMPLETIONS)
            for one in servers
        ]
        assert all(count[257] == 3 for count in counts), "the long prompt, three times, on both"
        assert [one.paths().count(LOAD) for one in servers] == [3, 3]
        servers[1].base_only = True
        told = f"Parity gate, at {servers[1].url} alone of 2 servers: with a trial adapter that"
        with pytest.raises(RunFailed, match=told):
            pass_gate(parts, config)


# -- what the gate and the start refuse ------------------------------------------------------------


PERMUTED = np.array([(token * 7 + 3) % 256 for token in range(256)] + [256, 257, 258])


@pytest.mark.parametrize(
    ("fault", "value", "told"),
    [
        ("base_only", True, "with a trial adapter that changes log-probs by .* engine and learner"),
        pytest.param(
            "raw",
            True,
            r" before the temperature, .* is 0\.7: start it with --logprobs-mode processed_logprobs",
            marks=pytest.mark.slow,
        ),
        ("permuted", PERMUTED, "disagree by .* nats|end-of-sequence"),
    ],
    ids=["the base model", "raw log-probs", "another tokenizer"],
)
def test_the_gate_stops_a_server_that_samples_from_another_policy(
    tmp_path: Path, parts: RunParts, server: VLLMDouble, fault: str, value: Any, told: str
) -> None:
    setattr(server, fault, value)
    with pytest.raises((RunFailed, ServerFailure), match=told) as caught:
        pass_gate(parts, served(tmp_path, server.url, training={"temperature": 0.7}))
    said = str(caught.value)
    assert server.permuted is not None or (said.startswith("Parity gate:") and is_quoted(said))


def test_log_probs_before_the_temperature_are_right_at_1(
    tmp_path: Path, parts: RunParts, server: VLLMDouble
) -> None:
    server.raw = True
    pass_gate(parts, served(tmp_path, server.url, training={"temperature": 1.0}))


ENDS_ELSEWHERE = "does not end completions at the model's end-of-sequence"
NO_TOKEN_HAS = "returned a log-prob of -1.*, which no sampled token has"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            first(9, (404, {"detail": "Not Found"}), LOAD),
            "no adapters: start it with --enable-lora",
        ),
        (first(9, (200, "Success"), LOAD), r"does not list the new adapter "),
        (refusing("max_lora_rank is 2", LOAD), "answered 400: max_lora_rank is 2"),
        (first(9, (200, {"choices": []})), "returned 0 completions for a request of 1"),
        (
            first(9, (200, "<html>")),
            r"http.* in a form that retrain does not know: <html> \(4 tries",
        ),
        (first(9, (200, {"choices": ["six"]})), r'does not know: {"choices": \["six"\]}'),
        (first(9, (401, {"error": "Unauthorized"})), r"variable in \[inference\] api_key_env"),
        (choice(token_ids=[300] * 6), "sampled token 300, and the model has 259 tokens"),
        (choice(token_ids=[258] * 6), ENDS_ELSEWHERE + " tokens"),
        (choice(token_ids=[9] * 6, finish_reason="stop"), ENDS_ELSEWHERE),
        (
            choice(token_ids=[9] * 4, logprobs=of(*[0.0] * 4)),
            "cut a completion after 4 of 6 tokens",
        ),
        (choice(token_ids=[9] * 5 + [-1]), "sampled token -1, and the model has 259 tokens"),
        (choice(token_ids=[9] * 5 + [9.5]), r"returned 9\.5 as the id of a token"),
        (choice(token_ids=[9] * 5 + [None]), "returned null as the id of a token"),
        (choice(logprobs=of(float("nan"))), "returned a log-prob of NaN"),
        (choice(logprobs=of(0.5)), r"returned a log-prob of 0\.5"),
        (choice(logprobs=of(None)), r"returned a log-prob of null, .* \(4 tries in"),
        (choice(logprobs=None), r'does not know: {"choices": \[{"finish_reason": "length"'),
        (choice(logprobs=of(-1e300)), NO_TOKEN_HAS),  # beyond float32
        (choice(logprobs=of(-(10**400))), NO_TOKEN_HAS),
        (choice(token_ids=[9] * 2, finish_reason="abort"), r'finish_reason = "abort" \(4 tries'),
        (
            choice(token_ids=[9] * 2, finish_reason="content_filter"),
            r'finish_reason = "content_filter", and not at .* such as a filter',
        ),
        (choice(token_ids=[9] * 5), "returned 5 tokens with 6 log-probs"),
        (choice(prompt_token_ids=[1]), "a prompt that reached the model with other token ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_server_does_wrong_is_said_in_one_sentence(
    tmp_path: Path, server: VLLMDouble, fault: Any, told: str
) -> None:
    server.faults.append(fault)
    with (
        closing(engine_of(served(tmp_path, server.url))) as engine,
        pytest.raises(RetrainError, match=told) as caught,
    ):
        engine.sync(lab().save_adapter, 0)
        list(engine.sample([request(1)]))
    assert "\n" not in str(caught.value)
    kind = ConfigurationError if "--enable-lora" in told else ServerFailure
    assert isinstance(caught.value, kind)


def test_a_server_with_too_short_a_context_is_refused_before_it_cuts_anything(
    tmp_path: Path, server: VLLMDouble
) -> None:
    server.context = 24
    with adapted(tmp_path, server) as engine:
        assert len(list(engine.sample([request(1, max_tokens=4)]))) == 1
        told = r"takes 24 tokens, and \[training\] max_tokens = 6 after a prompt of 20 needs 26"
        with pytest.raises(ServerFailure, match=told):
            list(engine.sample([request(1)]))


def test_a_server_that_does_not_answer_stops_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(dump_toml(served(tmp_path / "run", "http://127.0.0.1:9", engine="vllm")))
    assert main([str(toml)]) == 3
    output = capsys.readouterr()
    told = "The vllm server does not answer (http://127.0.0.1:9: no connection"
    assert told in output.err and output.err.count("\n") == 1
    assert "Loading train model" not in output.out


@pytest.mark.parametrize("own", [False, True], ids=["log_dir", "adapter_dir"])
def test_an_adapter_that_the_server_cannot_read_is_told_with_its_path(
    tmp_path: Path, server: VLLMDouble, own: bool
) -> None:
    """vLLM's words for a folder that is not there. The folders may be read by any user, whatever
    the umask.
    """
    place = tmp_path / "shared" if own else tmp_path / "run"
    (tmp_path / "run").mkdir()
    modes: list[int] = []

    def not_there(path: str, body: Any) -> Any:
        if path != LOAD:
            return None
        folder = Path(body["lora_path"])
        assert folder.parent.parent == place
        modes.extend(
            each.stat().st_mode & 0o777 for each in (folder.parent, folder, *folder.iterdir())
        )
        return 404, {
            "error": {
                "message": f"Loading lora {body['lora_name']} failed: No adapter found for {folder}"
            }
        }

    server.faults.append(not_there)
    before = os.umask(0o077)
    try:
        with closing(
            engine_of(
                served(
                    tmp_path / "run",
                    server.url,
                    inference={"adapter_dir": str(place) if own else ""},
                )
            )
        ) as engine:
            key = r"\[inference\] adapter_dir" if own else r"\[logging\] log_dir"
            with pytest.raises(
                ServerFailure,
                match=(
                    rf"cannot read the adapter in {place}/.*Server and learner must both see"
                    rf" {key} under"
                ),
            ):
                engine.sync(lab().save_adapter, 0)
    finally:
        os.umask(before)
    assert modes[:2] == [0o755, 0o755] and set(modes[2:]) == {0o644}
    assert not list(place.glob(".served-*"))


def test_a_folder_for_adapters_that_cannot_be_made_is_named_with_its_key(
    tmp_path: Path, server: VLLMDouble
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        EnvironmentFailure,
        match=r"\[inference\] adapter_dir = '.*/file/in' is not a usable folder .Not a directory.; name",
    ):
        engine_of(
            served(tmp_path, server.url, inference={"adapter_dir": str(tmp_path / "file" / "in")})
        )


# -- kept sets, sleep, other servers ---------------------------------------------------------------


def test_a_truncated_run_asks_for_the_kept_sets_and_is_refused_without_them(
    tmp_path: Path, parts: RunParts, server: VLLMDouble
) -> None:
    config = served(tmp_path, server.url, training={"top_k": 5, "temperature": 0.7})
    with pytest.raises(
        ConfigurationError,
        match=r"answers without a sampling_mask at .*\. Start it with --return-sampling-mask",
    ):
        HastyVLLM.preflight(config)
    with pytest.raises(ConfigurationError, match="reports the kept tokens only with one"):
        HastyVLLM.preflight(served(tmp_path, server.url, training={"top_p": 0.9}))
    server.kept_sets = True
    assert pass_gate(parts, config).max_difference < 1e-4
    with closing(engine_of(config)) as engine:
        engine.sync(lab().save_adapter, 0)
        (one,) = engine.sample([request(1, truncation=Truncation(top_k=5))])
        assert one.kept.tolist() == [5] * len(one.token_ids)
        assert WITHOUT_PENALTY.items() <= server.asked[-1][1]["sampling_params"].items()
        list(engine.sample([request(1, temperature=0.0, truncation=Truncation(top_k=5))]))
        assert server.asked[-1][1]["top_k"] == 1 and server.asked[-1][1]["temperature"] == 1.0, (
            "temperature 0 is refused beside kept sets"
        )


@pytest.mark.slow
def test_the_server_sleeps_while_the_learner_learns_and_is_checked_when_it_wakes(
    tmp_path: Path, server: VLLMDouble
) -> None:
    server.sleeps = True
    folder = tmp_path / "run"

    def forgets_later(path: str, body: Any) -> None:
        server.forgets_adapters_asleep = server.paths().count("/sleep") >= 3

    server.faults.append(forgets_later)
    config = served(
        folder,
        server.url,
        engine="vllm_double.SleepyVLLM",
        training={"max_steps": 6, "group_size": 4, "max_tokens": 24, "lr": 3e-2},
    )
    with pytest.raises(
        RunFailed, match="after a server woke up or came back, engine and learner disagree"
    ):
        train(config, quiet=True)
    assert len(lines(folder / "metrics.jsonl")) == 3, (
        "a wake after the first step, which the whole gate checks, and one that passed"
    )
    order = [path for path in server.paths() if path in ("/sleep", "/wake_up", LOAD)]
    assert order[4:7] == ["/sleep", "/wake_up", LOAD], "awake before it is given the next adapter"
    assert order.count("/sleep") == order.count("/wake_up") == 3 and not server.asleep


def test_a_server_never_sleeps_without_the_mode_or_without_a_gpu(
    tmp_path: Path, server: VLLMDouble
) -> None:
    for make, sleeps in ((SleepyVLLM, False), (HastyVLLM, True)):
        server.sleeps = sleeps
        engine = engine_of(served(tmp_path, server.url), make)
        engine.sleep()
        engine.close()
    assert "/sleep" not in server.paths()


def test_a_server_that_cannot_tell_whether_it_sleeps_is_served_awake(
    tmp_path: Path, server: VLLMDouble
) -> None:
    """vLLM's own error at that question closes the connection, too."""
    server.sleeps = server.hangs_up_on_server_info = True
    with adapted(tmp_path, server, SleepyVLLM) as engine:
        engine.sleep()
        assert len(list(engine.sample([request(3)]))) == 3
    assert "/sleep" not in server.paths()


def test_an_openai_server_is_trained_with_if_it_returns_ids_and_log_probs(
    tmp_path: Path, server: VLLMDouble
) -> None:
    config = served(tmp_path, server.url, engine="openai")
    server.token_strings = True
    with closing(engine_of(config, OpenAIEngine)) as engine:
        engine.sync(lab().save_adapter, 0)
        assert len(list(engine.sample([request(3)]))) == 3
    assert OpenAIEngine.preflight(config) == ""
    texts = {"tokens": ["6"], "token_logprobs": [-1.0]}  # of a server that ignores the field
    server.faults.append(first(9, (200, {"choices": [{"text": "6", "logprobs": texts}]})))
    with pytest.raises(ConfigurationError, match="it returns no token ids with log-probs, and"):
        small_run(config, quiet=True)


@pytest.mark.parametrize("kind", first_of(["ids", "text", "chat"]))
def test_a_field_that_a_strict_server_refuses_is_left_out_and_said_once(
    tmp_path: Path, server: VLLMDouble, kind: str
) -> None:
    server.replies_text, server.chats = kind == "text", kind == "chat"
    server.refuses = frozenset({"repetition_penalty", "min_tokens"})
    said: list[str] = []
    with closing(engine_of(served(tmp_path, server.url, engine="openai"), OpenAIEngine)) as engine:
        engine.log = said.append
        for _ in range(2):
            list(engine.sample([MESSAGES]))
        engine._pool.run(engine._look(engine._pool.servers[0]))
        engine._speak()
    body = next(body for _, body in reversed(server.asked) if "temperature" in body)
    assert {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
    }.items() <= body.items()
    assert not server.refuses & body.keys()
    told = (
        f"The OpenAI-compatible server {server.url} does not take repetition_penalty, min_tokens,"
        " so its own values"
    )
    assert len(said) == 1 and said[0].startswith(told)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["", "max_tokens", "max_completion_tokens"])
def test_a_server_without_token_ids_is_evaluated_and_not_trained_with(
    tmp_path: Path, server: VLLMDouble, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    """Without a `limit` it completes text, and a model in this process counts the tokens; else it
    has /v1/chat/completions alone, and puts the messages into the template of this process.
    """
    server.replies_text, server.chats, server.chat_limit = not limit, bool(limit), limit
    config = served(
        tmp_path / "run",
        server.url,
        engine="openai",
        reward={"type": "match"},
        evaluation={"max_examples": 4, "samples": 1, "temperature": 0.0},
        data={"system_prompt": "Add.", "prompt_template": "Now {prompt}"},
    )
    local = replaced(config, {"inference.engine": "pytorch"})
    for name, each in (("served", config), ("local", local)):
        (tmp_path / f"{name}.toml").write_text(dump_toml(each))
    assert main([str(tmp_path / "served.toml")]) == 2
    by_text = "it answers a prompt of token ids with 400 (prompt must be a string), and the loss"
    told = "it has /v1/chat/completions alone" if limit else by_text
    assert f"serves evaluations, not training: {told}" in capsys.readouterr().err
    found = []
    for name in ("served", "local"):
        output = tmp_path / name
        assert main(["eval", str(output.with_suffix(".toml")), "--output", str(output)]) == 0
        printed = capsys.readouterr()
        counted = "again to count its tokens" in printed.out + printed.err
        assert limit or counted is (name == "served")
        keys = ("completion", "reward", "finish_reason", "num_tokens")
        found.append([[line[key] for key in keys] for line in lines(output / "samples.jsonl")])
    assert found[0] == found[1] and len(found[0]) == 4
    assert server.calls >= 4 and not server.adapters
    if limit:
        asked = [body for path, body in server.asked if path == CHAT][-1]["messages"]
        assert [message["role"] for message in asked] == ["system", "user"]
        assert asked[1]["content"].startswith("Now ")


def text_of(folder: Path, server: VLLMDouble, choice: dict[str, Any], **usage: int) -> Completion:
    """What becomes of the only choice of a server of text or of messages."""
    server.chats, server.replies_text = "message" in choice, "text" in choice
    choice = {"index": 0, "finish_reason": "length", "logprobs": None, **choice}
    path = CHAT if server.chats else COMPLETIONS
    with closing(engine_of(served(folder, server.url, engine="openai"), OpenAIEngine)) as engine:
        server.faults.append(first(1, (200, {"choices": [choice], "usage": usage}), path))
        (found,) = engine.sample([replace(MESSAGES, max_tokens=24)])
    return found


@pytest.mark.parametrize(
    ("message", "reason"),
    first_of(
        [
            ({"content": None}, "content_filter"),
            ({"content": "6"}, None),
            ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
            ({"content": None, "refusal": "I will not."}, "stop"),
            ({"content": ["6"]}, "stop"),
        ],
        quick=2,
    ),
)
def test_a_reply_that_is_no_answer_is_never_scored(
    tmp_path: Path, server: VLLMDouble, message: dict[str, Any], reason: str | None
) -> None:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
    told = f"finish_reason = {json.dumps(reason)}, and without an answer to score"
    with pytest.raises(ServerFailure, match=told):
        text_of(tmp_path, server, choice)


@pytest.mark.parametrize(
    ("reply", "reason", "text", "finish"),
    [
        (
            {"message": {"role": "assistant"}},
            "length",
            "",
            "length",
        ),  # all tokens went into reasoning
        ({"message": {"content": None}}, "length", "", "length"),
        ({"message": {"content": "6"}}, "eos", "6", "stop"),
        ({"text": "6"}, "eos_token", "6", "stop"),
    ],
)
def test_other_servers_words_for_a_reply_are_understood(
    tmp_path: Path, server: VLLMDouble, reply: dict[str, Any], reason: str, text: str, finish: str
) -> None:
    found = text_of(tmp_path, server, {"finish_reason": reason, **reply})
    assert (found.text, found.finish_reason.value) == (text, finish)


_LONG = "1" * 25


@pytest.mark.parametrize("chats", first_of([True, False]))
@pytest.mark.parametrize(
    ("text", "usage", "told"),
    [
        (_LONG, {}, "returned 25 tokens for a request of at most 24. It ignores max_tokens"),
        ("6", {"completion_tokens": 25}, "returned 25 tokens for a request of at most 24"),
        (_LONG, {"completion_tokens": 24}, ""),  # its tokens may be other ones
        (
            "1" * 10_000,
            {"completion_tokens": 24},
            "returned 10,000 characters as 24 tokens for a request of at most 24",
        ),
        ("1" * 23 + "\ufffd" * 9, {}, ""),  # each is a byte that could not be decoded
    ],
)
def test_a_reply_of_more_tokens_than_were_asked_for_is_never_scored(
    tmp_path: Path, server: VLLMDouble, chats: bool, text: str, usage: dict[str, int], told: str
) -> None:
    reply: dict[str, Any] = {"message": {"content": text}} if chats else {"text": text}
    with pytest.raises(ServerFailure, match=told) if told else nullcontext():
        assert text_of(tmp_path, server, reply, **usage).text == text


def test_ids_of_more_tokens_than_were_asked_for_are_refused(
    engine: Any, server: VLLMDouble
) -> None:
    """Even where they end at an EOS, as a completion within the limit would."""
    ids = [5] * 40 + [engine._dialect.eos_ids[0]]
    logprobs = {"token_logprobs": [-1.0] * 41}
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
    server.faults.append(first(1, (200, {"choices": [choice]})))
    told = "returned 41 tokens for a request of at most 24: it ignores max_tokens"
    with pytest.raises(ServerFailure, match=told):
        list(engine.sample([replace(request(1), max_tokens=24)]))


def test_a_dialogue_is_not_evaluated_on_a_server_of_messages_alone(
    tmp_path: Path, server: VLLMDouble
) -> None:
    """Its later prompts continue token ids."""
    server.chats = True
    with closing(engine_of(served(tmp_path, server.url, engine="openai"), OpenAIEngine)) as engine:
        told = r"/v1/chat/completions alone, .* continues token ids"
        with pytest.raises(ConfigurationError, match=told):
            list(engine.sample([EVALUATED]))


def test_a_server_that_answers_neither_text_nor_messages_is_told_with_its_answer(
    tmp_path: Path, server: VLLMDouble
) -> None:
    server.chats, server.chat_limit = True, "another_limit"
    with pytest.raises(ServerFailure, match="answered 400: Unsupported parameter"):
        OpenAIEngine.preflight(served(tmp_path, server.url, engine="openai"))


def test_a_trained_adapter_is_not_evaluated_on_a_server_that_cannot_load_it(
    tmp_path: Path, server: VLLMDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(small(tmp_path / "run", training={"max_steps": 1}), quiet=True)
    server.replies_text = True
    asked = ["eval", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    assert main([*asked, "--inference-engine", "openai", "--inference-url", server.url]) == 2
    assert "loads no adapters" in capsys.readouterr().err


def test_the_name_of_the_base_model_must_be_one_that_the_server_has(
    tmp_path: Path, server: VLLMDouble
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r'served_model = "other": The vllm server .* has base. Name a model of this list',
    ):
        HastyVLLM.preflight(served(tmp_path, server.url, inference={"served_model": "other"}))


# -- faults in the middle of a run -----------------------------------------------------------------


def later(
    folder: Path, fault: Callable[[str, Any], Any], steps: int = 1
) -> Callable[[str, Any], Any]:
    """From the end of that many steps on."""
    metrics = folder / "metrics.jsonl"
    return lambda path, body: (
        fault(path, body) if metrics.exists() and len(lines(metrics)) >= steps else None
    )


def test_damaged_answers_cost_a_second_try_and_nothing_else(
    tmp_path: Path, server: VLLMDouble
) -> None:
    """Of sampling, of loading an adapter and of unloading one."""
    logprobs = {"token_logprobs": [None] * 6}
    nulls = {"finish_reason": "length", "token_ids": [9] * 6, "logprobs": logprobs}
    damaged = {
        2: (500, "oops"),
        3: (200, "<html>"),
        5: (200, '{"choices": [{"tok'),
        7: (200, {"choices": [nulls]}),
    }
    server.faults.append(scripted(damaged))
    server.faults += [scripted({2: (500, "oops")}, path) for path in (LOAD, UNLOAD)]
    run = small_run(served(tmp_path / "run", server.url), quiet=True)
    assert run.summary.steps == 3 and not server.adapters
    assert server.paths().count(COMPLETIONS) == server.calls + 4 == 10


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (first(99, (500, {"error": {"message": DEAD}})), "its engine has died"),
        (first(99, (401, {"error": "Unauthorized"})), "it requires a key"),
        pytest.param(
            slow(6.0),
            r"did not answer a request within \[inference\] timeout_s = 1, 3 times in a row,"
            r" though it is healthy: raise",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["EngineDead", "401", "too slow"],
)
def test_a_run_whose_server_fails_is_saved_and_resumes(
    tmp_path: Path, server: VLLMDouble, fault: Any, told: str
) -> None:
    folder, rarely_saved = tmp_path / "run", {"training": {"save_every": 50}}
    server.faults.append(later(folder, fault))
    config = served(
        folder,
        server.url,
        inference={"timeout_s": 1.0 if "healthy" in told else 30.0},
        **rarely_saved,
    )
    again = (
        f"continue with `retrain {folder}/config.toml --resume {folder}`, at another address with"
    )
    told = rf"{told}.* The run is saved after 1 step: {again}"
    with pytest.raises(ServerFailure, match=told) as caught:
        small_run(config, quiet=True)
    assert is_quoted(str(caught.value))
    assert len(lines(folder / "metrics.jsonl")) == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    server.faults.clear()
    run = small_run(
        served(folder, server.url, resume={"from": str(folder)}, **rarely_saved), quiet=True
    )
    assert [record.step for record in run.records()] == [0, 1, 2]


def kills(server: VLLMDouble) -> Callable[[str, Any], Any]:
    def fault(path: str, body: Any) -> tuple[int, str]:
        threading.Thread(target=server.kill, daemon=True).start()
        return 0, ""

    return fault


@pytest.mark.slow
def test_a_killed_server_is_replaced_by_another_at_another_address(
    tmp_path: Path, server: VLLMDouble
) -> None:
    folder, rarely_saved = tmp_path / "run", {"training": {"save_every": 50}}
    server.faults.append(later(folder, kills(server), steps=2))
    with pytest.raises(
        ServerFailure, match=rf"does not answer \({server.url}: .* The run is saved after 2 steps"
    ):
        small_run(served(folder, server.url, **rarely_saved), quiet=True)
    with doubles() as (other,):
        config = served(
            folder,
            other.url,
            resume={"from": str(folder)},
            inference={"timeout_s": 60.0},
            **rarely_saved,
        )
        run = small_run(config, quiet=True)
    assert [record.step for record in run.records()] == [0, 1, 2]


def test_a_server_that_was_restarted_gets_the_adapter_before_any_request(
    tmp_path: Path, server: VLLMDouble
) -> None:
    """A server that comes back has forgotten its adapters, and answers 404 to their names."""

    def restarts(path: str, body: Any) -> None:
        if path == COMPLETIONS and server.paths().count(COMPLETIONS) == 3:
            server.adapters.clear()

    server.faults.append(restarts)
    run = small_run(served(tmp_path / "run", server.url), quiet=True)
    assert run.summary.steps == 3 and server.paths().count(LOAD) > 3


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "--skip-parity"])
def test_a_server_that_comes_back_as_another_is_found_before_the_step_learns(
    tmp_path: Path, server: VLLMDouble, trusted: bool
) -> None:
    """Restarted in the third step, when the gate has passed twice, it samples from the base
    model.
    """
    folder = tmp_path / "run"

    def restarts(path: str, body: Any) -> None:
        if path == COMPLETIONS and not server.base_only:
            server.adapters.clear()
            server.base_only = True

    server.faults.append(later(folder, restarts, steps=2))
    config = served(
        folder, server.url, training={"lr": 0.05, "group_size": 4, "max_tokens": 24}
    )  # the lab always begins alike
    if trusted:
        assert small_run(config, quiet=True).summary.steps == 3 and server.base_only
    else:
        with pytest.raises(RunFailed, match="after a server woke up or came back, "):
            train(config, quiet=True)
        assert len(lines(folder / "metrics.jsonl")) == 2


def test_one_of_two_servers_may_die(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with doubles(2) as (one, other):
        one.faults.append(later(tmp_path / "run", kills(one)))
        run = small_run(served(tmp_path / "run", one.url, other.url))
        assert run.summary.steps == 3
    said = [line for line in capsys.readouterr().out.splitlines() if "servers left" in line]
    assert len(said) == 1 and one.url in said[0] and is_quoted(said[0])


def test_what_a_killed_run_left_is_removed_and_unloaded_and_others_stay(
    tmp_path: Path, server: VLLMDouble
) -> None:
    host = socket.gethostname().replace("-", "_")
    folders = {
        "left": tmp_path / f".served-{host}-999999999-a",
        "running": tmp_path / f".served-{host}-1-b",
        "elsewhere": tmp_path / ".served-other-999999999-c",
    }
    for folder in folders.values():
        folder.mkdir()
    server.adapters |= {name: folder / "version-3" for name, folder in folders.items()}
    server.adapters["mine"] = Path("/adapters/mine")
    engine = engine_of(served(tmp_path, server.url))
    said: list[str] = []
    engine.log = said.append
    list(engine.sample([request(adapter_slot=BASE_MODEL)]))
    engine.close()
    assert not folders["left"].exists() and folders["running"].exists()
    assert list(server.adapters) == ["running", "elsewhere", "mine"]
    told = f"The vllm server {server.url} still had the adapter left of a killed run; unloaded it."
    assert said == [told]


def test_two_runs_may_share_a_server(tmp_path: Path, server: VLLMDouble) -> None:
    """Each samples from its own adapter, whatever versions both have, and unloads its own alone."""
    one, other = (engine_of(served(tmp_path / name, server.url)) for name in ("one", "other"))
    for engine in (one, other, one):
        engine.sync(lab().save_adapter, 0)
    assert len(server.adapters) == 2
    server.asked.clear()
    for engine in (one, other):
        list(engine.sample([request()]))
    assert {body["model"] for path, body in server.asked if path == COMPLETIONS} == set(
        server.adapters
    )
    one.close()
    list(other.sample([request()]))
    other.close()
    assert not server.adapters


# -- the switch ------------------------------------------------------------------------------------


def test_a_server_that_returns_one_completion_n_times_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=?", "answer": "never"}}\n' for n in range(4))
    )
    lab()
    server = OneForAll()
    sections = {
        "data": {"source": str(tmp_path / "sums.jsonl")},
        "reward": {"type": "match"},
        "training": {"max_tokens": 80},
    }
    try:
        run = small_run(served(tmp_path / "run", server.url, **sections), quiet=True)
    finally:
        server.kill()
    assert run.summary.untrained.startswith(
        "3 steps trained nothing: the completions of each group are the same, token by token"
    )
    assert [record.groups_identical for record in run.records()] == [2] * 3


@pytest.mark.slow
def test_skipping_the_gate_is_said_loudly_and_recorded(
    tmp_path: Path, server: VLLMDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    server.base_only = True
    toml = tmp_path / "run.toml"
    toml.write_text(
        dump_toml(
            served(
                tmp_path / "run", server.url, engine="vllm", training={"max_steps": 2, "lr": 1e-6}
            )
        )
    )
    assert main([str(toml), "--skip-parity"]) == 0
    assert (
        "Parity gate skipped (--skip-parity): retrain does not check that the vllm engine samples"
        " from the trained policy" in capsys.readouterr().out
    )
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["parity_gate"] is None
    assert main([str(toml), "--overwrite"]) == 1, "the gate stops the same run"


def test_completions_are_the_requests_own(engine: Any) -> None:
    found: list[Completion] = list(engine.sample([request(3, first_sample=4), request(2)]))
    samples = sorted((one.request, one.sample) for one in found)
    assert samples == [(0, 4), (0, 5), (0, 6), (1, 0), (1, 1)]
    assert all(one.finish_reason in FinishReason and one.entropies is None for one in found)


def test_a_signal_is_answered_while_a_lost_server_should_load_an_adapter(
    tmp_path: Path, server: VLLMDouble
) -> None:
    class Patient(HastyVLLM):
        patience = replace(HASTY, silent_s=60)

    engine = engine_of(served(tmp_path, server.url), Patient)
    server.kill()
    started, gone = time.monotonic(), list[str]()

    def stop() -> None:
        if gone:
            raise Interrupted("stopped", signal.SIGINT)

    engine.check, engine.log = stop, gone.append
    with closing(engine), pytest.raises(Interrupted):
        engine.sync(lab().save_adapter, 0)
    assert time.monotonic() - started < 30 and "it is tried again" in gone[0]


def test_a_server_that_hangs_does_not_hold_up_the_end_of_a_run(
    tmp_path: Path, server: VLLMDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.served._LEAVE_S", 0.2)

    def hang(path: str, body: Any) -> Any:
        if path != "/v1/unload_lora_adapter":
            return None
        time.sleep(2)
        return 0, ""

    class Patient(HastyVLLM):
        patience = replace(HASTY, silent_s=60)

    for timeout_s in (60.0, 0.1):
        inference = {"timeout_s": timeout_s}
        engine = engine_of(served(tmp_path, server.url, inference=inference), Patient)
        engine._adapter = ServedAdapter("one", tmp_path)
        server.faults = [hang]
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 1.8


def test_a_server_that_comes_back_during_a_sync_gets_the_new_version_too(
    engine: Any, server: VLLMDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was loading the old one, which it keeps no longer: the new one goes to those that are
    there.
    """
    old, load, given = engine._adapter, engine._dialect.load, list[str]()
    new = ServedAdapter("new", old.folder)

    async def slow_load(to: Any, adapter: ServedAdapter) -> None:
        given.append(adapter.name)
        engine._adapter = new
        await load(to, adapter)

    monkeypatch.setattr(engine._dialect, "load", slow_load)
    engine._pool.run(engine._prepare(engine._pool.servers[0]))
    assert given == [old.name, "new"] and list(server.adapters) == ["new"]


def test_a_server_that_fails_within_its_look_is_looked_at_again_before_it_serves(
    tmp_path: Path,
) -> None:
    class HastyOpenAI(OpenAIEngine):
        patience = HASTY

    with doubles(2) as (one, other):
        failing = True
        other.faults.append(lambda path, _: (503, "") if failing and path == COMPLETIONS else None)
        config = served(tmp_path, one.url, other.url, engine="openai")
        with closing(engine_of(config, HastyOpenAI)) as engine:
            late = engine._pool.servers[1]
            assert not late.alive and "refused_fields" not in late.facts
            failing = False
            engine._pool.run(engine._pool._take_back(late))
            assert late.alive and late.facts["refused_fields"] == []


def test_patience_bounds_the_tries_of_one_server_too(tmp_path: Path) -> None:
    """Whatever the engine's own patience is."""
    config = small(
        tmp_path, inference={"engine": "vllm", "url": "http://127.0.0.1:1", "patience_s": 5.0}
    )
    pool = ServerPool(VLLMDialect(config, []), patience=Patience(silent_s=9))
    try:
        assert pool._patience.silent_s == 5.0
    finally:
        pool.close()
