"""One run on two real servers of vLLM, both started from the lab model by different commands."""

import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from real_servers import Printed, RealServer, await_steps, largest_difference
from runs import small

from retrain import train

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]


def answered(server: RealServer) -> float:
    """Completions that the server has finished since its start, by its own count."""
    page = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(map(float, re.findall(r"^vllm:request_success_total\S* (\S+)$", page, re.MULTILINE)))


def test_both_share_the_samples_and_have_each_new_adapter(
    tmp_path: Path, vllm: RealServer, printed_vllm: Printed
) -> None:
    """A server that keeps an old adapter moves its half of the ratios."""
    pair = (vllm, printed_vllm)
    before = [answered(one) for one in pair]
    training = {"max_steps": 4, "batch_size": 8, "lr": 3e-3, "temperature": 0.7, "max_tokens": 48}
    inference = {"engine": "vllm", "url": [one.url for one in pair]}
    run = train(small(tmp_path, inference=inference, training=training), quiet=True)
    shares = [answered(one) - count for one, count in zip(pair, before, strict=True)]
    print(f"\ncompletions of each: {shares}")
    gate = json.loads((run.folder / "environment.json").read_text())["parity_gate"]
    differences = [largest_difference(record) for record in run.records()]
    print("largest differences, nats:", ", ".join(f"{value:.1e}" for value in differences))
    assert len(differences) == 4 and max(*differences, gate["max_difference"]) < 1e-3
    assert min(shares) > sum(shares) / 4


def test_a_run_goes_on_with_one_where_the_other_is_killed(
    tmp_path: Path, vllm: RealServer, printed_vllm: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a pause: it is not waited for where another answers."""

    def kill() -> None:
        await_steps(tmp_path, 2)
        printed_vllm.kill()

    threading.Thread(target=kill, daemon=True).start()
    inference = {"engine": "vllm", "url": [vllm.url, printed_vllm.url]}
    try:
        run = train(small(tmp_path, inference=inference, training={"max_steps": 8}))
    finally:
        printed_vllm.kill()
        printed_vllm.start(printed_vllm.command)  # the next test waits for it
    records, printed = run.records(), capsys.readouterr().out.splitlines()
    said, back = ([line for line in printed if end in line] for end in ("servers left", "back."))
    print(f"\n{said + back}\nseconds:", ", ".join(f"{one.step_time_s or 0:.1f}" for one in records))
    # It may still answer /health while it dies: then it is taken back in between.
    assert all(printed_vllm.url in line for line in said + back)
    assert len(said) == len(back) + 1
    assert len(records) == 8 and max(map(largest_difference, records)) < 1e-3
    assert max(record.step_time_s or 0 for record in records) < 300, (
        "it waited its patience of 600 s"
    )
