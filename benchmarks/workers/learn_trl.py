"""TRL's learning pass: GRPOTrainer's own training step on given rows instead of sampled ones. Runs
in the peers' Python.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from job import Rows, make_rows
from peft import PeftModel
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from worker import measured, serve

PADDING = 0


class GivenRows(GRPOTrainer):
    """Takes a micro-batch as it comes, instead of sampling one."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


def build(settings: dict[str, Any], rows: Rows, folder: str) -> GivenRows:
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    count, batch = len(rows.completions), settings["batch"]
    return GivenRows(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(rows.job.prompts)}),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=count // batch,
            num_generations=rows.job.group,
            max_completion_length=max(rows.job.lengths),
            gradient_checkpointing=settings["checkpointing"],
            learning_rate=0.0,
            beta=0.0,
            loss_type="dapo",  # the mean over all tokens of the batch, as ours
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
        ),
    )


def micro_batches(rows: Rows, old: dict[str, np.ndarray], size: int) -> list[dict[str, Any]]:
    """Micro-batches as TRL makes them: prompts padded on the left, completions on the right, to the
    longest of the whole batch.
    """
    count = len(rows.completions)
    prompt_length, length = max(map(len, rows.job.prompts)), max(rows.job.lengths)
    prompts, prompt_mask = (
        np.full((count, prompt_length), PADDING, np.int64),
        np.zeros((count, prompt_length), np.int64),
    )
    completions, mask = (
        np.full((count, length), PADDING, np.int64),
        np.zeros((count, length), np.int64),
    )
    logprobs = np.zeros((count, length), np.float32)
    for number, completion in enumerate(rows.completions):
        prompt = rows.prompt_of(number)
        (
            prompts[number, prompt_length - len(prompt) :],
            prompt_mask[number, prompt_length - len(prompt) :],
        ) = (
            prompt,
            1,
        )
        completions[number, : len(completion)], mask[number, : len(completion)] = completion, 1
        logprobs[number, : len(completion)] = old[f"{number:05d}"]
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": rows.advantages,
        "old_per_token_logps": logprobs,
    }
    total = torch.tensor(float(rows.job.tokens))
    return [
        {key: torch.from_numpy(value[start : start + size]) for key, value in whole.items()}
        | {"num_items_in_batch": total}
        for start in range(0, count, size)
    ]


def setup(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    torch.set_num_threads(settings["threads"])
    rows = make_rows(
        settings["vocabulary"],
        settings["prompts"],
        settings["group"],
        settings["tokens"],
        settings["ragged"],
    )
    folder = tempfile.TemporaryDirectory()
    trainer = build(settings, rows, folder.name)
    parts = micro_batches(rows, load_file(settings["logprobs"]), settings["batch"])
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.model.train()
    sum(
        float(parameter.sum()) for parameter in trainer.model.parameters()
    )  # weights are read from the file when they are first used
    if settings["checkpointing"]:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.model.enable_input_require_grads()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        with measured() as measure:
            for part in parts:
                loss += float(trainer.training_step(trainer.model, dict(part), None))
            trainer.optimizer.step()
        if "gradient" in request:
            gradient = {
                name.replace(".default.", "."): p.grad
                for name, p in trainer.model.named_parameters()
                if p.grad is not None
            }
            save_file(gradient, request["gradient"])
        return {**vars(measure), "loss": loss, "note": ""}

    return answer


if __name__ == "__main__":
    serve(setup, ("trl", "torch", "transformers", "peft", "accelerate"))
