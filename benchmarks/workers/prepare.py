"""Preparations of a benchmark: an adapter, a model that never ends a completion, a model of the
lab's shape, a random one.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from worker import serve

from retrain.model.text import LAB_MODEL

RANK, ALPHA = 16, 32
_B_SCALE = 0.01
LAB: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "tie_word_embeddings": True,
}
"""The lab model's shape, as arguments of Qwen3Config."""
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def adapter(model: str, folder: str) -> dict[str, Any]:
    """LoRA on every linear layer. B is not zero, so that gradients reach A and no peer can skip the
    adapter.
    """
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wrapped = get_peft_model(
        base,
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, _B_SCALE)
    wrapped.save_pretrained(folder)
    return {"vocabulary": base.config.vocab_size}


def shape(folder: str, context: int) -> dict[str, Any]:
    """Random weights in the lab model's shape, with a context of `context` tokens and the lab's
    tokenizer. Its chat template writes only a message's text.
    """
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(LAB_MODEL)
    tokenizer.chat_template = _PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3Config(**LAB, **ends, max_position_embeddings=context)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return {"vocabulary": config.vocab_size}


def random(folder: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Random weights in a shape of config.json."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    return {}


def endless(model: str, folder: str, prompts: list[str]) -> dict[str, Any]:
    """`model` with an EOS token that it does not draw, and a chat template that writes only a
    message's text.

    Every trainer that reads this folder then samples completions of full length. The EOS token is
    the least probable one after these prompts; the benchmark reports the lengths.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    highest = torch.full((network.config.vocab_size,), -torch.inf)
    with torch.no_grad():
        for prompt in prompts:
            logits = network(
                **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            ).logits[0]
            highest = torch.maximum(highest, logits.log_softmax(-1).amax(0))
    never = int(highest[: len(tokenizer)].argmin())
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for file in Path(model).glob("*.safetensors*"):
        shutil.copyfile(file, target / file.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(never)
    tokenizer.chat_template = _PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    network.config.eos_token_id = never
    network.config.save_pretrained(folder)
    special = {
        "eos_token_id": never,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    transformers.GenerationConfig(**special).save_pretrained(folder)
    return {"eos_token_id": never, "highest_logprob": float(highest[never])}


def setup(settings: dict[str, Any]) -> Any:
    torch.set_num_threads(settings["threads"])
    makers = {"adapter": adapter, "shape": shape, "random": random, "endless": endless}
    return lambda request: makers[request.pop("make")](**request)


if __name__ == "__main__":
    serve(setup, ("torch", "transformers", "peft"))
