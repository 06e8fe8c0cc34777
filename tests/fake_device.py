"""A model on the meta device, whose tensors are fake ones."""

import warnings
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from retrain.config import TrainConfig
from retrain.model.adapter import Adapter
from retrain.model.head import Head
from retrain.model.load import BaseModel
from retrain.model.text import load_model_config

DEVICE = torch.device("meta")


def on_device(
    config: TrainConfig, dtype: torch.dtype, stack: ExitStack
) -> tuple[BaseModel, Adapter]:
    """A model with its adapter; until the stack closes, every tensor is a fake one."""
    with DEVICE:
        model = AutoModelForCausalLM.from_config(load_model_config(config.model.model), dtype=dtype)
    base = BaseModel(
        model.requires_grad_(False).eval(),
        model.base_model,
        Head(model.lm_head.weight),
        DEVICE,
        dtype,
    )
    adapter = Adapter(base, config.model, config.lora, config.training.seed)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    adapter.peft_model.to_empty(device=DEVICE)
    return replace(base, head=Head(model.lm_head.weight)), adapter
