"""The Tinker backend with the real SDK, in an environment without torch, against a real server:
SkyRL on a CPU with the lab model.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_proxy import Fault, faulty_proxy
from real_servers import LAB, ROOT, RealServer, free_port, started

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]  # a busy machine compiles for minutes

CLIENT = Path(os.environ.get("RETRAIN_SERVERS", ".servers")).resolve() / "tinker-client"
KEY = "tml-test-key-that-nobody-must-see"
UNCHECKED = "--skip-parity"
"""For runs about something else: the gate costs as much as two steps."""
TOML = """
[backend]
backend = "tinker"

[backend.options]
loss_reduction = "mean"
timeout_s = {timeout}

[model]
model = "{model}"
base_url = "{url}"
lora_rank = 8

[data]
source = "lab"

[reward]
type = "custom"
custom_module = "even"

[algorithm]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[training]
seed = 1
max_steps = {steps}
batch_size = 4
group_size = 8
max_tokens = 24
lr = 3e-3
save_every = {save_every}

[loss]
max_grad_norm = 1.0
"""
EVEN = """
import re

def score(response: str, reference: str) -> float:
    found = re.search(r"=\\d*(\\d)\\.", response)
    return float(found is not None and int(found[1]) % 2 == 0)
"""


@dataclass(frozen=True)
class Client:
    """The command line in an environment without torch."""

    folder: Path

    def write(
        self, url: str, *, steps: int = 3, save_every: int = 1, timeout: int = 600, more: str = ""
    ) -> Path:
        (self.folder / "even.py").write_text(EVEN)
        path = self.folder / "run.toml"
        path.write_text(
            TOML.format(model=LAB, url=url, steps=steps, save_every=save_every, timeout=timeout)
            + more
        )
        return path

    def start(self, *arguments: str | Path, key: str = KEY) -> "subprocess.Popen[str]":
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TINKER_", "PYTHON"))
        }
        command = [str(CLIENT / "bin" / "python"), "-m", "retrain", *map(str, arguments)]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment | {"TINKER_API_KEY": key, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit code and everything printed, which never holds the key or a traceback."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=1200)
        assert KEY not in output and "Traceback" not in output, output
        return process.returncode, output

    def python(self, code: str, *arguments: str) -> None:
        subprocess.run(
            [str(CLIENT / "bin" / "python"), "-c", code, *arguments],
            cwd=self.folder,
            env=os.environ | {"TINKER_API_KEY": KEY},
            check=True,
            timeout=600,
        )

    def metrics(self, run: str = "logs/train") -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()
        ]


@pytest.fixture(scope="module")
def environment() -> None:
    script = str(ROOT / "scripts" / "servers" / "tinker-client.sh")
    subprocess.run(
        [script, str(CLIENT)], check=True, timeout=900, env={"PYTHON": sys.executable} | os.environ
    )


@pytest.fixture(scope="module")
def service(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    # The gradients of all adapters are kept, at this rank, which is that of the runs.
    sizes = {
        "max_lora_adapters": 32,
        "max_lora_rank": 8,
        "sample_max_num_sequences": 32,
        "train_micro_batch_size": 8,
    }
    flags = (str(tmp_path_factory.mktemp("service")), "--backend-config", json.dumps(sizes))
    with started("tinker", (LAB, flags)) as (one,):
        yield one


@pytest.fixture(scope="module")
def learned(service: RealServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Client, str]:
    """A finished run, and what it printed."""
    client = Client(tmp_path_factory.mktemp("learned"))
    code, output = client.run(client.write(service.url, steps=8, save_every=8))
    assert code == 0, output
    return client, output


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


ARRIVING = """
import sys
sys.path.insert(0, sys.argv[1])
import tinker_engine
from skyrl.tinker.db_models import FutureDB, RequestStatus, enable_sqlite_wal
from skyrl.tinker.types import RequestType
from sqlmodel import Session, SQLModel, create_engine

database = create_engine("sqlite:///queue.db")
enable_sqlite_wal(database)
SQLModel.metadata.create_all(database)
engine = object.__new__(tinker_engine.Engine)
with Session(database) as look:
    assert not engine.find_batchable_model_passes(look, RequestType.FORWARD_BACKWARD)
    with Session(database) as client:
        for kind in (RequestType.FORWARD_BACKWARD, RequestType.OPTIM_STEP):
            client.add(FutureDB(request_type=kind, model_id="model", request_data={}, status=RequestStatus.PENDING))
            client.commit()
    assert not engine.find_single_requests(look), "the step would be made before its pass"
with Session(database) as look:
    assert len(engine.find_single_requests(look)) == 1
"""


def test_the_engine_of_these_tests_makes_no_step_before_its_pass(tmp_path: Path) -> None:
    """Both arrive while it looks at its queue; SkyRL's own engine then saw the step alone."""
    python, scripts = CLIENT.with_name("tinker") / "bin" / "python", ROOT / "scripts" / "servers"
    subprocess.run(
        [str(python), "-c", ARRIVING, str(scripts)],
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu"} | os.environ,
        check=True,
    )


# -- a run -----------------------------------------------------------------------------------------


def test_the_client_environment_has_neither_torch_nor_peft(environment: None) -> None:
    code = (
        "import importlib.util as u, retrain; assert not any(map(u.find_spec, ('torch', 'peft',"
        " 'jax'))); print(retrain.__file__)"
    )
    found = subprocess.run(
        [str(CLIENT / "bin" / "python"), "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert str(CLIENT) in found.stdout  # the installed package, not this checkout


def test_a_run_prints_the_lines_of_the_guide_and_its_reward_rises(
    learned: tuple[Client, str],
) -> None:
    client, output = learned
    wanted = [
        r"Loading tokenizer for .* \.\.\.",
        r"Vocabulary table: 259 entries",
        r"Pre-encoded 4096 prompts",
        r"Connecting to Tinker\.\.\.",
        r"Creating LoRA training client \(model=.*, rank=8\)\.\.\.",
        r"Training client ready\.",
        r"  group: \d/8 correct \| answer=\d+",
        r"Step 0 \[maxrl\+gtpo_sepa\] \| loss=-?\d\.\d{4} \| reward=",
    ]
    positions = [
        found.start() if (found := re.search(f"^{line}", output, re.MULTILINE)) else -1
        for line in wanted
    ]
    assert -1 not in positions and positions == sorted(positions), output
    rewards = [line["mean_reward"] for line in client.metrics()]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:4]) + 0.1, rewards


def test_a_supervised_stage_runs_at_the_service(service: RealServer, client: Client) -> None:
    """The optimizer of reinforcement is a new one, in an adapter that the stage's weights are in."""
    rows = [{"prompt": f"{n}+1", "completion": f"{n}+1={n + 1}."} for n in range(8)]
    traces = client.folder / "traces.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = f'\n[sft]\nsource = "{traces}"\nsteps = 3\nbatch_size = 8\n'
    code, output = client.run(client.write(service.url, steps=1, more=more), UNCHECKED)
    assert code == 0, output
    sft = [json.loads(line) for line in (client.folder / "logs/train/sft.jsonl").open()]
    assert sft[2]["loss"] < sft[0]["loss"] - 0.1
    assert output.count("Creating training client from tinker://") == 1
    assert len(client.metrics()) == 1


def test_sampler_and_learner_of_the_service_agree_at_every_step(
    learned: tuple[Client, str],
) -> None:
    client, _ = learned
    for line in client.metrics():
        assert line["num_datums"] == 0 or line["logprob_diff_p99"] < 1e-3
        assert line["loss_is_placeholder"] is False
    gate = json.loads((client.folder / "logs/train/environment.json").read_text())["parity_gate"]
    assert gate["max_difference"] < 1e-4 and gate["tokens"] > 100


SCORE = """
import pickle, sys
from pathlib import Path
from retrain.backends.tinker.backend import TinkerBackend
from retrain.config import load_config
rows = pickle.loads(Path("rows.pickle").read_bytes())
backend = TinkerBackend(load_config("run.toml"), eos_ids=[258], log=print)
backend.load(Path(sys.argv[1]))
before = backend.logprobs(rows)
result = backend.train([r for r in rows], 0)
Path("scored.pickle").write_bytes(pickle.dumps((before, result, backend.logprobs(rows))))
backend.close()
"""


def test_log_probs_loss_and_gradient_are_those_of_the_local_backend(
    learned: tuple[Client, str],
) -> None:
    """The same rows, the same adapter (downloaded): the service's log-probs, the loss, and the norm
    of the gradient, so its scale too.
    """
    import pickle

    from retrain.backends.local.backend import LocalBackend
    from retrain.config import config_from_mapping
    from retrain.types import Row

    client, _ = learned
    adapter = client.folder / "logs/train/checkpoints/final"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    local = LocalBackend(
        config_from_mapping(
            {
                "model": {"model": str(LAB), "lora_rank": 8},
                "lora": {
                    "init_from": str(adapter),
                    "alpha": int(settings["lora_alpha"]),
                    "target_modules": settings["target_modules"],
                },
                "training": {"temperature": 1.0, "lr": 1e-3, "max_tokens": 24},
                "backend": {"devices": "cpu"},
            }
        ),
        eos_ids=[258],
    )
    noise = np.random.default_rng(0)

    def row(prompt: int, action: int, group: int) -> Row:
        ids = noise.integers(32, 122, prompt + action).astype(np.int32)
        nothing = np.zeros(action, np.float32)
        return Row(
            ids,
            ((prompt, prompt + action),),
            nothing,
            noise.normal(size=action).astype(np.float32),
            group,
        )

    rows = [
        row(prompt, action, group)
        for group, (prompt, action) in enumerate([(5, 7), (9, 20), (3, 1), (12, 11)])
    ]
    own = local.logprobs(rows)
    rows = [
        Row(
            r.token_ids,
            r.spans,
            old + noise.normal(0, 0.1, len(old)).astype(np.float32),
            r.advantages,
            r.group,
        )
        for r, old in zip(rows, own)
    ]
    (client.folder / "rows.pickle").write_bytes(pickle.dumps(rows))
    client.python(SCORE, "logs/train/checkpoints/step_000008")
    scored, result, after = pickle.loads((client.folder / "scored.pickle").read_bytes())
    expected = local.train(rows, 0)
    local.close()
    differences = np.abs(np.concatenate(scored) - np.concatenate(own))
    print(
        f"largest difference of {len(differences)} log-probs: {differences.max():.2e}; loss"
        f" {result.loss:.6f} and {expected.loss:.6f}; gradient norm {result.grad_norm:.6f} and"
        f" {expected.grad_norm:.6f}"
    )
    assert differences.max() < 1e-4
    assert result.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    assert result.ratio_mean == pytest.approx(expected.ratio_mean, rel=1e-4)
    assert (
        np.abs(np.concatenate(after) - np.concatenate(scored)).max() > 1e-4
    )  # the update did something


# -- kills and faults ------------------------------------------------------------------------------


def test_a_killed_run_continues_from_its_last_checkpoint_with_the_optimizer(
    service: RealServer, client: Client
) -> None:
    process = client.start(client.write(service.url, steps=3), UNCHECKED)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Step 1 "):
            process.kill()
            break
    process.wait()
    code, output = client.run("run.toml", "--resume", "logs/train", UNCHECKED)
    assert code == 0, output
    assert re.search(
        r"^Creating training client from tinker://\S+/weights/\S+\.\.\.$", output, re.MULTILINE
    )
    assert [line["step"] for line in client.metrics()] == [0, 1, 2]
    assert "Step 0 " not in output


def test_transient_errors_are_waited_out_and_nothing_is_lost(
    service: RealServer, client: Client
) -> None:
    faults = (
        Fault("/asample", 429, times=2, after=12),
        Fault("/asample", 503, times=2, after=20),
        Fault("/forward_backward", 503, times=2),
        Fault("/retrieve_future", 500, times=2, after=10),
    )
    with faulty_proxy(service.url, *faults) as (url, traffic):
        code, output = client.run(client.write(url))
    assert code == 0, output
    assert traffic.injected[429] >= 2 and traffic.injected[503] >= 3 and traffic.injected[500] == 2
    assert [line["step"] for line in client.metrics()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/optim_step", 400, "refused the request (400: injected 400)"),
        ("/asample", 401, "refused the key in TINKER_API_KEY (401)"),
    ],
)
def test_a_refusal_is_one_sentence_and_the_run_resumes(
    service: RealServer, client: Client, path: str, status: int, words: str
) -> None:
    with faulty_proxy(service.url) as (url, traffic):
        process = client.start(client.write(url), UNCHECKED)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Step 0 "):
                traffic.faults = [Fault(path, status)]
        assert process.wait() == 3
        output = "".join(lines)
        assert "Traceback" not in output and KEY not in output, output
        (sentence,) = [line for line in lines if line.startswith("retrain: ")]
        assert words in sentence and "--resume logs/train" in sentence
        traffic.faults = []
        code, resumed = client.run("run.toml", "--resume", "logs/train", UNCHECKED)
    assert code == 0, resumed
    assert [line["step"] for line in client.metrics()] == [0, 1, 2]


def test_a_dead_service_ends_the_run_and_another_address_resumes_it(
    service: RealServer, client: Client
) -> None:
    with faulty_proxy(service.url) as (url, _):
        process = client.start(client.write(url, timeout=30), UNCHECKED)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Step 0 "):
                break
    output = process.stdout.read()
    assert process.wait() == 3, output
    assert "Traceback" not in output and f"Tinker at {url} gave no answer within 30 s" in output, (
        output
    )
    code, resumed = client.run(
        "run.toml", "--resume", "logs/train", "--base-url", service.url, UNCHECKED
    )
    assert code == 0, resumed
    assert [line["step"] for line in client.metrics()] == [0, 1, 2]


def test_an_absent_service_and_a_missing_key_are_told_at_once(
    client: Client, environment: None
) -> None:
    path = client.write(f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    code, output = client.run(path)
    assert (
        code == 3
        and "Nothing answers at [model] base_url" in output
        and time.monotonic() - began < 60
    )
    process = client.start(path, "--overwrite", key="")
    assert (
        "TINKER_API_KEY is not set" in process.communicate(timeout=60)[0]
        and process.returncode == 3
    )


# -- campaigns -------------------------------------------------------------------------------------

CAMPAIGN = """
[campaign]
seeds = [1, 2, 3]
max_steps = 1
parallel = true
max_workers = 6

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[evaluation]
at_end = false
"""


def test_six_workers_of_a_campaign_share_four_places(service: RealServer, client: Client) -> None:
    with faulty_proxy(service.url) as (url, traffic):
        code, output = client.run(
            client.write(url, more=CAMPAIGN),
            "--log-dir",
            "logs/campaign",
            "--batch-size",
            "2",
            "--group-size",
            "4",
        )
    assert code == 0, output
    assert (client.folder / "logs/campaign/tinker_throttle").is_dir()
    assert len([*(client.folder / "logs/campaign/runs").glob("*/summary.json")]) == 6
    assert 0 < traffic.most_sampling <= 4
