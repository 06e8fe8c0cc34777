"""A few steps of TRL's GRPOTrainer: seconds of each step by phase, and peak memory. Runs in the
peers' Python.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from device import measured_on
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from worker import serve

_PAGE, _MAX_PROMPT = 64, 512


class Clock(TrainerCallback):
    """Seconds of each step, and of the sampling inside, which TimedTrainer reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.sampling, self.lengths = 0.0, [0]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.sampling = time.perf_counter(), 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        total = time.perf_counter() - self.began
        self.steps.append(
            {
                "total": total,
                "sample": self.sampling,
                "learn": total - self.sampling,
                "trained": len(self.lengths),
                "mean_tokens": float(np.mean(self.lengths)),
            }
        )


class TimedTrainer(GRPOTrainer):
    clock: Clock

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        made = super()._generate_single_turn(*arguments, **keywords)
        self.clock.sampling += time.perf_counter() - began
        self.clock.lengths = [len(ids) for ids in made[0]]
        return made


def paging(settings: dict[str, Any], completions: int) -> dict[str, int]:
    """A KV cache for every completion with its prompt; the default takes half of the machine's
    memory.
    """
    pages = -(-(settings["tokens"] + _MAX_PROMPT) // _PAGE)
    return {
        "page_size": _PAGE,
        "num_blocks": completions * (pages + 1),
        "max_batch_tokens": 1024,
        "max_requests_per_batch": completions,
    }


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    prompts = [
        json.loads(line)["prompt"] for line in Path(settings["data"]).read_text().splitlines()
    ]
    rng = np.random.default_rng(0)
    on_cpu, rank = settings.get("device", "cpu") == "cpu", settings["rank"]
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        completions = settings["prompts"] * settings["group"]
        with (
            tempfile.TemporaryDirectory() as folder,
            measured_on(settings.get("device", "cpu")) as measure,
        ):
            trainer = TimedTrainer(
                model=AutoModelForCausalLM.from_pretrained(
                    settings["model"], dtype=torch.float32 if on_cpu else torch.bfloat16
                ),
                processing_class=tokenizer,
                reward_funcs=lambda completions, **_: (
                    (rng.random(len(completions)) < 0.5).astype(float).tolist()
                ),
                train_dataset=Dataset.from_dict({"prompt": prompts}),
                peft_config=lora,
                args=GRPOConfig(
                    output_dir=folder,
                    max_steps=request["steps"],
                    per_device_train_batch_size=settings["batch"],
                    gradient_accumulation_steps=completions // settings["batch"],
                    num_generations=settings["group"],
                    max_completion_length=settings["tokens"],
                    gradient_checkpointing=settings["checkpointing"],
                    use_transformers_continuous_batching=settings["continuous"],
                    transformers_continuous_batching_config=(
                        paging(settings, completions) if settings["continuous"] else None
                    ),
                    learning_rate=1e-5,
                    lr_scheduler_type="constant",
                    max_grad_norm=1.0,
                    beta=0.0,
                    loss_type="dapo",  # the mean over all tokens of the batch, as ours
                    temperature=1.0,
                    use_cpu=on_cpu,
                    bf16=not on_cpu,
                    report_to="none",
                    save_strategy="no",
                    disable_tqdm=True,
                ),
            )
            trainer.clock = Clock()
            trainer.add_callback(trainer.clock)
            trainer.train()
        return {"steps": trainer.clock.steps, "peak_gib": measure.peak_gib}

    return answer


if __name__ == "__main__":
    serve(setup, ("trl", "torch", "transformers", "peft", "accelerate"))
