"""Two ways to give a vLLM server a new adapter, timed: `python benchmarks/adapter_reload.py URL --adapter FOLDER` beside a running server.

`new name`: a name and a folder for every version, the old one unloaded, as retrain does it. `in place`: one name, a new folder, and
load_inplace. For each version: seconds until the server serves it, then tokens per second of 8 prompts x 8 completions.
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

VERSIONS, PROMPTS, COMPLETIONS, TOKENS = 8, 8, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--adapter", type=Path, required=True, help="PEFT folder")
    parser.add_argument("--vocabulary", type=int, default=256, help="prompts are random ids below it")
    given = parser.parse_args()
    with httpx.Client(base_url=given.url, timeout=600, trust_env=False) as client, TemporaryDirectory() as folder:
        for round_ in range(2):  # the first round also warms the server up
            for way in ("new name", "in place"):
                measured = measure(client, way, given.adapter, Path(folder) / f"{way}-{round_}", given.vocabulary)
                if round_:
                    print(f"{way}: {measured[0] * 1000:.0f} ms to load, {measured[1]:.0f} tokens/s (medians of {VERSIONS} versions)")


def measure(client: httpx.Client, way: str, adapter: Path, folder: Path, vocabulary: int) -> tuple[float, float]:
    """(seconds to load, tokens per second), medians over the versions."""
    loading, speed, old = [], [], ""
    for version in range(VERSIONS):
        path = folder / str(version)
        shutil.copytree(adapter, path)
        name = f"version-{version}" if way == "new name" else "policy"
        start = time.perf_counter()
        post(client, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **({} if way == "new name" else {"load_inplace": True}))
        if old and old != name:
            post(client, "/v1/unload_lora_adapter", lora_name=old)
        loading.append(time.perf_counter() - start)
        speed.append(tokens_per_second(client, name, vocabulary, version))
        old = name
    post(client, "/v1/unload_lora_adapter", lora_name=old)
    return median(loading), median(speed)


def tokens_per_second(client: httpx.Client, name: str, vocabulary: int, seed: int) -> float:
    prompts = np.random.default_rng(seed).integers(0, vocabulary, (PROMPTS, 100)).tolist()
    settings: dict[str, Any] = {"model": name, "n": COMPLETIONS, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    start = time.perf_counter()
    with ThreadPoolExecutor(PROMPTS) as pool:
        list(pool.map(lambda prompt: post(client, "/v1/completions", prompt=prompt, **settings), prompts))
    return PROMPTS * COMPLETIONS * TOKENS / (time.perf_counter() - start)


def post(client: httpx.Client, path: str, **body: Any) -> None:
    client.post(path, json=body).raise_for_status()


if __name__ == "__main__":
    main()
