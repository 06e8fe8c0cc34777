"""The learning pass of retrain, or the plain reference that it is compared with, as
settings["kind"] says.

A request may name a file for the gradient. The reference also writes the log-probs that all others
use as the sampler's.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job import Rows, make_rows
from worker import serve

import retrain.system

retrain.system.prepare_torch()

import numpy as np  # noqa: E402 - torch reads its environment when it is imported
import torch  # noqa: E402
from device import measured_on  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from retrain.backends.local.backend import LocalBackend  # noqa: E402
from retrain.config import config_from_mapping  # noqa: E402
from retrain.types import Row  # noqa: E402

Answer = Callable[[dict[str, Any]], dict[str, Any]]

_STALENESS = 0.05
"""Nats; far inside the clip range of 0.2, so that all losses agree."""


def reference(settings: dict[str, Any]) -> Answer:
    """Each row alone, without padding, all logits at once, in settings["dtype"]. Writes its
    gradient, and the old log-probs for all.

    The old log-probs differ from the new ones by up to _STALENESS nats, so that ratios are not 1
    and the loss depends on the log-probs. The first reference writes them; a later one in another
    dtype reads them.
    """
    rng = np.random.default_rng(3)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    device = settings.get("device", "cpu")
    base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model = (
        PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True)
        .eval()
        .to(device, dtype)
    )
    rows, staleness = rows_of(settings), settings.get("staleness", _STALENESS)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        total = 0.0
        written = Path(request["logprobs"])
        logprobs = load_file(written) if written.exists() else {}
        for number, completion in enumerate(rows.completions):
            prompt = rows.prompt_of(number)
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None].to(
                device
            )
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            new = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            name = f"{number:05d}"
            if name not in logprobs:
                logprobs[name] = new.detach().cpu().numpy() + rng.uniform(
                    -staleness, staleness, len(completion)
                ).astype(np.float32)
            old = torch.from_numpy(logprobs[name]).to(device)
            loss = -(torch.exp(new - old) * float(rows.advantages[number])).sum() / rows.job.tokens
            loss.backward()
            total += loss.item()
        save_file({name: torch.from_numpy(values) for name, values in logprobs.items()}, written)
        gradient = {
            name.replace(".default.", "."): p.grad.cpu()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        save_file(gradient, request["gradient"])
        return {"loss": total}

    return answer


def ours(settings: dict[str, Any]) -> Answer:
    """`LocalBackend.train` at learning rate 0, so that all passes are equal; with beta1 = 0 AdamW's
    first moment is the gradient.
    """
    backend = LocalBackend(
        config_from_mapping(
            {
                "model": {
                    "model": settings["model"],
                    "lora_rank": settings["rank"],
                    "dtype": "fp32",
                },
                "lora": {"init_from": settings["adapter"]},
                "backend": {"devices": settings.get("device", "cpu")},
                "training": {
                    "seed": 0,
                    "lr": 0.0,
                    "temperature": 1.0,
                    "max_tokens": settings["tokens"],
                    **settings["training"],
                },
                "optimizer": {"beta1": 0.0},
                "loss": settings.get("loss", {}),
            }
        ),
        eos_ids=(2**31 - 1,),
    )
    rows = rows_of(settings)
    old = load_file(settings["logprobs"])
    learned = [
        Row(
            token_ids=np.concatenate([rows.prompt_of(number), completion]).astype(np.int32),
            spans=((len(rows.prompt_of(number)), len(rows.prompt_of(number)) + len(completion)),),
            logprobs=old[f"{number:05d}"],
            advantages=np.full(len(completion), rows.advantages[number], np.float32),
            group=number // rows.job.group,
            sample=number % rows.job.group,
        )
        for number, completion in enumerate(rows.completions)
    ]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        with measured_on(settings.get("device", "cpu")) as measure:
            result = backend.train(learned, 0)
        if "gradient" in request:
            with tempfile.TemporaryDirectory() as folder:
                backend.save(Path(folder))
                moments = load_file(Path(folder) / "optimizer.safetensors")
            gradient = {
                name.removeprefix("m."): torch.from_numpy(value)
                for name, value in moments.items()
                if name.startswith("m.")
            }
            save_file(gradient, request["gradient"])
        choices = backend.choices
        note = (
            f"micro-batches of {choices.micro_batch_tokens} tokens, checkpointing"
            f" {'on' if choices.gradient_checkpointing else 'off'}"
        )
        return {**vars(measure), "loss": result.loss, "note": note}

    return answer


def rows_of(settings: dict[str, Any]) -> Rows:
    return make_rows(
        settings["vocabulary"],
        settings["prompts"],
        settings["group"],
        settings["tokens"],
        settings["ragged"],
    )


def setup(settings: dict[str, Any]) -> Answer:
    torch.set_num_threads(settings["threads"])
    return {"reference": reference, "retrain": ours}[settings["kind"]](settings)


if __name__ == "__main__":
    serve(setup, ("retrain", "torch", "transformers", "peft"))
