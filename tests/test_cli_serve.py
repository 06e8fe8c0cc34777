"""`retrain serve`: the command that starts a server as a configuration needs it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.main import main
from retrain.cli.serve import left_by_learner, server_command, startable_engines
from retrain.config import TrainConfig, config_from_mapping
from retrain.config.keys import keys_by_path
from retrain.config.needs import built_in
from retrain.errors import ConfigurationError
from retrain.inference_engine.commands import ServerCommand, ServerNeeds, Variable
from retrain.inference_engine.vllm import LORA_RANKS
from retrain.model.budget import NO_LIMIT, PROMPT_ALLOWANCE

CPU = ServerNeeds("/models/m", "float32", "cpu", 700, 1024)
GPU = ServerNeeds("/models/m", "bfloat16", "cuda", 700, 1024)


def command(engine: str, needs: ServerNeeds = GPU, **sections: dict[str, Any]) -> str:
    return server_command(engine, config_of(**sections), needs, "/env/bin/python").shell()


def config_of(**sections: dict[str, Any]) -> TrainConfig:
    return config_from_mapping(
        {"training": {"batch_size": 4, "group_size": 4, "max_tokens": 600}} | sections
    )


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    file = tmp_path / "lab.toml"
    file.write_text('[model]\nmodel = "lab"\n[data]\nsource = "lab"\n')
    return file


def test_vllm_is_told_everything_that_a_run_relies_on() -> None:
    lines = command("vllm", CPU, model={"lora_rank": 40}).replace(" \\\n", "\n").split("\n")
    for line in (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "TORCHDYNAMO_DISABLE=1",
        "/env/bin/python -m vllm.entrypoints.openai.api_server",
        "  --model /models/m",
        "  --host 127.0.0.1",
        "  --dtype float32",
        "  --max-model-len 700",
        "  --enable-lora",
        "  --max-lora-rank 64",
        "  --max-loras 2",
        "  --logprobs-mode processed_logprobs",
        "  --generation-config vllm",
        "  --enable-prefix-caching",
        "  --enforce-eager",
    ):
        assert line in lines


def test_vllm_takes_what_the_learner_leaves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it takes 90%, and the learner finds nothing left."""
    backend = {"devices": "cuda:0"}
    config = config_of(model={"model": "lab"}, data={"source": "lab"}, backend=backend)
    large = left_by_learner(config, 100, memory_gib=80)
    small = left_by_learner(config, 100, memory_gib=4)
    assert large == pytest.approx(0.9, abs=0.06) and small is not None and 0 < small < large
    monkeypatch.setattr("retrain.cli.serve._UNPREDICTED", 1.0)
    with pytest.raises(ConfigurationError, match=r"leaves no room for a server: give it another"):
        left_by_learner(config, 100, memory_gib=4)
    told = command("vllm", replace(GPU, share=small))
    assert f"--gpu-memory-utilization {small:.2f}" in told
    assert "--gpu-memory-utilization" not in command("vllm") + command("vllm", CPU)


@pytest.mark.parametrize("rank", [1, 2, 8, 9, 257, 512])
def test_ranks_are_rounded_up_to_what_vllm_takes(rank: int) -> None:
    served = next(item for item in LORA_RANKS if item >= rank)
    assert f"--max-lora-rank {served} " in command("vllm", model={"lora_rank": rank})
    assert f"--max-lora-rank {rank} " in command("sglang", model={"lora_rank": rank})


def test_a_rank_beyond_vllms_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"lora_rank = 513 exceeds .* rank of 512"):
        command("vllm", model={"lora_rank": 513})


CHANGES: list[tuple[str, Any]] = [
    ("attention_kernel", "flash"),
    ("attention_kernel", "triton"),
    ("attention_kernel", "cutlass"),
    ("attention_kernel", "tk"),
    ("dtype", "fp8"),
    ("dtype", "fp4"),
    ("kv_cache_dtype", "bf16"),
    ("kv_cache_dtype", "fp8"),
    ("kv_cache_dtype", "int8"),
    ("prefix_caching", False),
]


@pytest.mark.parametrize("engine", startable_engines())
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_every_key_that_serve_passes_on_changes_the_command_or_is_refused(
    engine: str, name: str, value: Any
) -> None:
    """Both keys that a run leaves to the server, and those that it only allows rounding for."""
    outcome, _ = built_in("engine", engine).outcome(
        keys_by_path()[f"inference.{name}"], config_of()
    )
    assert outcome != "refused"
    try:
        changed = command(engine, inference={name: value})
    except ConfigurationError as error:
        assert f"[inference] {name} = " in str(error) and "is not a setting of a " in str(error)  # noqa: PT017
    else:
        assert changed != command(engine)


def test_a_truncated_run_asks_vllm_for_kept_sets() -> None:
    assert "--return-sampling-mask" in command("vllm", training={"top_k": 20})
    assert "--return-sampling-mask" not in command("vllm")


def test_the_first_url_gives_host_and_port_and_a_key_stays_in_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER_KEY", "do-not-show")
    inference = {
        "url": ["http://localhost:9001", "http://other:1"],
        "api_key_env": "SERVER_KEY",
        "served_model": "my model",
    }
    shown = command("vllm", inference=inference)
    assert "--host 127.0.0.1" in shown and "--port 9001" in shown
    assert "--served-model-name 'my model'" in shown
    assert 'VLLM_API_KEY="$SERVER_KEY"' in shown and "do-not-show" not in shown
    assert '--api-key "$SERVER_KEY"' in command("sglang", inference=inference)


def test_run_replaces_the_process_with_the_server(tmp_path: Path) -> None:
    code = (
        "from retrain.inference_engine.commands import ServerCommand, Variable\n"
        "words = ['/bin/sh', '-c', 'echo $PART $KEY']\n"
        "ServerCommand(words, {'PART': 'a b', 'KEY': Variable('SECRET')}).run()"
    )
    command, env = [sys.executable, "-c", code], {"SECRET": "s"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout == "a b s\n", found.stderr


def test_the_printed_command_is_a_shell_command() -> None:
    words = ["/bin/echo", "--name", "two words", "--key", Variable("HOME")]
    shown = ["/bin/sh", "-c", ServerCommand(words, {"A": "1 2"}).shell()]
    done = subprocess.run(shown, capture_output=True, text=True, env={"HOME": "/h"})
    assert done.stdout == "--name two words --key /h\n"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("vlm absent.toml", 2, "'vlm' is not a server of these: vllm, sglang, mlx."),
        (
            "mlx lab.toml --inference-attention-kernel tk",
            2,
            '[inference] attention_kernel = "tk" is not a setting of a mlx server',
        ),
        (
            "vllm lab.toml --backend prime_rl",
            2,
            '[backend] backend = "prime_rl" brings its own servers',
        ),
        (
            "mlx lab.toml --prompt-tokens 50 --run --python /nowhere/python",
            3,
            "/nowhere/python does not start",
        ),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    line: str, code: int, says: str, lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is not known is said before a missing file."""
    assert main(["serve", *line.replace("lab.toml", str(lab)).split()]) == code
    shown = capsys.readouterr()
    assert says in shown.err and not shown.out


def test_the_context_is_that_of_the_longest_prompt_and_completion(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["serve", "vllm", str(lab), "--max-tokens", "900"]
    assert main(asked) == 0
    counted = int(capsys.readouterr().out.partition("--max-model-len ")[2].split()[0])
    assert 900 < counted < 1100
    assert main([*asked, "--prompt-tokens", "300"]) == 0
    assert "--max-model-len 1200 " in capsys.readouterr().out


@pytest.mark.parametrize(("positions", "context"), [(NO_LIMIT, 512), (300, 300), (4096, 512)])
def test_the_context_has_room_for_the_gates_long_prompt_where_the_model_has(
    positions: int,
    context: int,
    lab: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("retrain.model.budget.context_length", lambda config: positions)
    assert main(["serve", "vllm", str(lab), "--max-tokens", "20", "--prompt-tokens", "50"]) == 0
    assert f"--max-model-len {context} " in capsys.readouterr().out


def test_a_dialogues_context_has_room_for_what_its_environment_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment's own prompts are counted, or --prompt-tokens says how long they are; its
    answers have an allowance beside them.
    """
    file = tmp_path / "guess.toml"
    game = 'provider = "retrain.environments.lab.NumberGuessing"\nargs = { examples = 2 }\n'
    file.write_text(f'[model]\nmodel = "lab"\n[environment]\n{game}[training]\nmax_tokens = 500\n')

    def context(*flags: str) -> int:
        assert main(["serve", "vllm", str(file), *flags]) == 0
        return int(capsys.readouterr().out.partition("--max-model-len ")[2].split()[0])

    assert 500 + PROMPT_ALLOWANCE < context() < 700 + PROMPT_ALLOWANCE
    told = ("--prompt-tokens", "300")
    assert context(*told) == 800 + PROMPT_ALLOWANCE
    assert context(*told, "--environment-max-turns", "1") == 800
