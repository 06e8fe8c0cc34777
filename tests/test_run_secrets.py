"""No secret of a run reaches its folder or its streams, whoever says it: a user's code, a judge, or
the configuration.
"""

import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from retrain.cli.main import main
from retrain.config import config_from_mapping, dump_toml
from retrain.records import redact
from retrain.run.notes import preflight_lines
from tests.judges import Handler, serving
from tests.runs import small, small_run


def canary(number: int, shape: str = "{}") -> str:
    """A secret whose first characters name it, so that half of it is found too."""
    return shape.format(f"qZ{number:02d}vKxW7p/9d+LmT3nB")


VARIABLES = {
    **{
        name: canary(number)
        for number, name in enumerate(
            ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "SESSION_COOKIE"]
        )
    },
    "THE_JUDGE": (
        canary(5).replace("/", "_").replace("+", "-")
    ),  # a name like any other, which judge_api_key_env makes a secret's
}
PARAMS = {
    "api_key": canary(6),
    "service": {"auth_token": canary(7), "mirrors": [{"password": canary(8)}]},
    "tokens_of_day": 3,
    "secrets": [canary(9), canary(10)],
}
SHAPES = [
    "hf_" + "qZ11vKxW7pLmT3nBqZ11",
    "sk-proj-" + "qZ12vKxW7pLmT3nBqZ12",
    "ghp_" + "qZ13vKxW7pLmT3nBqZ13vK",
    "AKIA" + "QZ14VKXW7PLMT3NB",
    "eyJqZ15vKxW7pLmT.eyJqZ15vKxW7pLmT.qZ15vKxW7pLmT",
    "https://me:qZ16vKxW7pLmT@judge.example/v1",
    "https://judge.example/v1?n=1&api_key=qZ17vKxW7pLmT",
    "Authorization: Bearer qZ18vKxW7pLmT3nB",
    "Authorization: Basic " + base64.b64encode(b"qZ19vKxW7p:qZ19vKxW7p").decode(),
    "glpat-" + "qZ20vKxW7pLmT3nBqZ20",
    "xoxb-" + "qZ21vKxW7pLmT3nB",
    "tml-" + "qZ22vKxW7pLmT3nBqZ22",
    "wandb_v1_" + "qZ23vKxW7pLmT3nBqZ23",
]
MARKS = [
    *(f"qZ{number:02d}vKx".encode() for number in range(24)),
    b"QZ14VKX",
    base64.b64encode(b"qZ19vKxW")[:10],
]

REWARD = """
import json

TEXTS = json.load(open("texts.json"))

def score(response, reference, params):
    with open("calls", "ab") as calls:  # they go on where a worker ended
        calls.write(b".")
        call = calls.tell() - 1
    text = TEXTS[call % len(TEXTS)]
    if call % 20 == 19:
        raise SystemExit(text)  # ends the worker
    raise RuntimeError(text)
"""


def said() -> list[str]:
    """Everything that is secret, in the forms in which it may be repeated, and where a cut of the
    text would halve it.
    """
    values = [*VARIABLES.values(), PARAMS["api_key"], canary(7), canary(8), canary(9), canary(10)]
    plain = [f"refused {value}" for value in [*values, *SHAPES]]
    forms = [
        json.dumps(values[0]),
        repr(values[1]),
        quote(values[2]),
        quote(values[6], safe=""),
        f"{values[3][:6]}\x1b[31m{values[3][6:]}",
    ]
    return [*plain, *forms, *("x" * (300 - back) + " " + values[4] for back in (8, 12, 16, 60, 80))]


def assert_nothing_leaked(folder: Path, streams: str, marks: list[bytes]) -> None:
    written = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert (
        "trainer_state.json" in written and "metrics.jsonl" in written and "config.toml" in written
    )
    leaks = [
        (name, mark)
        for name, content in {**written, "the streams": streams.encode()}.items()
        for mark in marks
        if mark in content
    ]
    assert not leaks
    assert b"\x1b" not in b"".join(
        content for name, content in written.items() if name.endswith((".json", ".jsonl", ".toml"))
    )


@pytest.fixture
def secretive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward that says every secret there is."""
    monkeypatch.setattr(redact, "_noted", set(), raising=False)
    monkeypatch.chdir(tmp_path)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "telltale.py").write_text(REWARD)
    (tmp_path / "texts.json").write_text(json.dumps(said()))
    return tmp_path


@pytest.mark.faults("canaries x files and streams")
def test_what_a_reward_says_is_masked_in_every_file_and_stream(
    secretive: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = {
        "type": "telltale.score",
        "params": PARAMS,
        "workers": 1,
        "max_failure_rate": 1.0,
        "judge_api_key_env": "THE_JUDGE",
    }
    steps = {
        "max_steps": 3,
        "batch_size": 2,
        "group_size": 8,
        "max_tokens": 4,
        "save_every": 1,
        "max_examples": 32,
    }
    config = small(
        secretive / "run", reward=reward, training=steps, logging={"generations_per_step": 16}
    )
    (secretive / "run.toml").write_text(dump_toml(config))
    assert main(["run.toml", "--overwrite", "--skip-parity"]) == 0
    out, err = capfd.readouterr()
    state = json.loads((secretive / "run" / "trainer_state.json").read_text())
    masked = [
        count
        for _, counts in state["rewards"]["steps"]
        for reason, count in counts.items()
        if "***" in reason
    ]
    assert sum(masked) > 30  # the reward did say them
    assert_nothing_leaked(secretive / "run", out + err, MARKS)
    # the other way to stop: the guard's sentence names the most frequent reason
    assert main(["run.toml", "--overwrite", "--skip-parity", "--reward-max-failure-rate", "0"]) == 1
    out, err = capfd.readouterr()
    assert "verdict" in err
    assert_nothing_leaked(secretive / "run", out + err, MARKS)


def test_a_short_secret_of_a_flag_is_masked_in_the_line_that_names_the_flag() -> None:
    line = preflight_lines(config_from_mapping({}, ["--reward-params", "db_password=hunter2"]))[0]
    assert line == 'From flags: reward.params = {db_password = "***"}'


@pytest.mark.faults("canaries x files and streams")
def test_what_a_judge_echoes_is_masked_in_every_file_and_stream(
    secretive: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = iter(said() * 9)

    def echoing(handler: Handler) -> None:
        if "2 + 2" in handler.prompt:
            handler.reply("yes")
        elif len(handler.prompt) % 2:
            handler.reply(next(texts))
        else:
            handler.error(403, f"{next(texts)} and {handler.headers['Authorization']}")

    with serving(echoing) as server:
        reward = {
            "type": "judge",
            "judge_model": "m",
            "judge_base_url": server.url,
            "judge_api_key_env": "THE_JUDGE",
            "params": {},
        }
        reward |= {"max_failure_rate": 1.0, "judge_cache": False}
        steps = {"max_steps": 4, "max_tokens": 4, "save_every": 1, "max_examples": 32}
        small_run(small(secretive / "run", reward=reward, training=steps))
    out, err = capfd.readouterr()
    state = json.loads((secretive / "run" / "trainer_state.json").read_text())
    assert "***" in json.dumps(state["rewards"])
    of_params = {f"qZ{number:02d}vKx".encode() for number in range(6, 11)}  # this run has none
    assert_nothing_leaked(
        secretive / "run", out + err, [mark for mark in MARKS if mark not in of_params]
    )
