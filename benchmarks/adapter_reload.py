"""Two ways to give a vLLM server a new adapter: `python benchmarks/adapter_reload.py URL` beside a
running server of the lab model.

`new name`: a name and a folder for every version, the old one unloaded, as retrain does it. `in
place`: one name, a new folder, and load_inplace. For each version: milliseconds until the server
serves it, then tokens per second of a batch. The two take turns, and the first version of each
warms the server up. `scripts/servers/vllm-start.sh DIR retrain/assets/lab 8000` starts such a
server.
"""

import argparse
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from report import add_output, load_average, publish, table

PROMPTS, COMPLETIONS, TOKENS, PROMPT_TOKENS = 4, 8, 32, 100
WAYS = ("new name", "in place")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument(
        "--adapter",
        type=Path,
        help="PEFT folder; an untrained one of the lab model, rank 16, if unset",
    )
    parser.add_argument(
        "--vocabulary", type=int, default=256, help="prompts are random ids below it"
    )
    parser.add_argument("--versions", type=int, default=8)
    add_output(parser)
    given = parser.parse_args()
    load = load_average()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with (
        httpx.Client(base_url=given.url, timeout=600, trust_env=False) as client,
        TemporaryDirectory() as folder,
    ):
        adapter = given.adapter or lab_adapter(Path(folder) / "lab")
        for version in range(given.versions + 1):
            for way in WAYS:
                path = Path(folder) / f"{way}-{version}"
                shutil.copytree(adapter, path)
                found[way].append(measure(client, way, path, version, given.vocabulary))
        for way in WAYS:
            unload(client, name_of(way, given.versions))
    rows = [
        [
            way,
            *(
                f"{low:.0f} / {middle:.0f} / {high:.0f}"
                for low, middle, high in map(spread, zip(*found[way][1:]))
            ),
        ]
        for way in WAYS
    ]
    work = (
        f"{given.versions} versions; for each a batch of {PROMPTS} prompts of {PROMPT_TOKENS}"
        f" tokens x {COMPLETIONS} completions of {TOKENS} tokens. Least / median / most."
    )
    publish(
        "adapter-reload",
        "A new adapter for a vLLM server",
        [work, table(["way", "ms to load", "tokens/s"], rows)],
        load,
        given.output,
    )


def measure(
    client: httpx.Client, way: str, folder: Path, version: int, vocabulary: int
) -> tuple[float, float]:
    """(milliseconds to load, tokens per second)."""
    name = name_of(way, version)
    start = time.perf_counter()
    post(
        client,
        "/v1/load_lora_adapter",
        lora_name=name,
        lora_path=str(folder),
        **({} if way == "new name" else {"load_inplace": True}),
    )
    if way == "new name" and version:
        unload(client, name_of(way, version - 1))
    loaded = time.perf_counter()
    prompts = (
        np.random.default_rng(version).integers(0, vocabulary, (PROMPTS, PROMPT_TOKENS)).tolist()
    )
    settings: dict[str, Any] = {
        "model": name,
        "n": COMPLETIONS,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
    }
    with ThreadPoolExecutor(PROMPTS) as pool:
        list(
            pool.map(
                lambda prompt: post(client, "/v1/completions", prompt=prompt, **settings), prompts
            )
        )
    return 1000 * (loaded - start), PROMPTS * COMPLETIONS * TOKENS / (time.perf_counter() - loaded)


def name_of(way: str, version: int) -> str:
    return f"version-{version}" if way == "new name" else "policy"


def unload(client: httpx.Client, name: str) -> None:
    post(client, "/v1/unload_lora_adapter", lora_name=name)


def post(client: httpx.Client, path: str, **body: Any) -> None:
    client.post(path, json=body).raise_for_status()


def spread(values: tuple[float, ...]) -> tuple[float, float, float]:
    return min(values), median(values), max(values)


def lab_adapter(folder: Path) -> Path:
    from retrain.backends.local.backend import LocalBackend
    from retrain.config import config_from_mapping

    sections = {
        "model": {"model": "lab", "lora_rank": 16},
        "data": {"source": "lab"},
        "backend": {"devices": "cpu"},
    }
    backend = LocalBackend(config_from_mapping(sections))
    backend.save_adapter(folder)
    backend.close()
    return folder


if __name__ == "__main__":
    main()
