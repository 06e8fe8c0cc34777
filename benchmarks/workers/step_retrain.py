"""A few steps of `retrain.train`: seconds of each step by phase, and peak memory."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import serve

import retrain.system

retrain.system.prepare_torch()

import torch  # noqa: E402 - it reads its environment when it is imported
from device import measured_on  # noqa: E402

from retrain import train  # noqa: E402
from retrain.config import config_from_mapping  # noqa: E402


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            config = config_from_mapping(
                {
                    "model": {
                        "model": settings["model"],
                        "train": "lora" if settings["rank"] else "full",
                        "lora_rank": settings["rank"] or 1,
                        "dtype": settings.get("dtype", "fp32"),
                    },
                    "inference": {"dtype": settings["inference_dtype"]},
                    "backend": {"devices": settings.get("device", "cpu")},
                    "data": {"source": settings["data"]},
                    "reward": {"type": "random", "random_p": 0.5},
                    "algorithm": {"advantage_mode": "grpo", "transform_mode": "none"},
                    "training": {
                        "seed": 0,
                        "max_steps": request["steps"],
                        "batch_size": settings["prompts"],
                        "group_size": settings["group"],
                        "max_tokens": settings["tokens"],
                        "temperature": 1.0,
                        "lr": 1e-5,
                        "save_every": request["steps"],
                    },
                    "loss": {"max_grad_norm": 1.0},
                    "logging": {"log_dir": str(Path(folder) / "run")},
                }
            )
            with measured_on(settings.get("device", "cpu")) as measure:
                run = train(config, quiet=True)
            steps = [
                {
                    "total": record.step_time_s,
                    "sample": record.time_sample_s,
                    "learn": record.time_learn_s,
                    "trained": record.num_datums,
                    "mean_tokens": record.completion_tokens_mean,
                    "ratio_max": record.ratio_max,
                }
                for record in run.records()
            ]
        return {"steps": steps, "peak_gib": measure.peak_gib}

    return answer


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
