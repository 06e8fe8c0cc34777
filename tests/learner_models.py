"""Tiny random models, rows and learners that the learner's tests share."""

import atexit
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from retrain.backends.local.learner import Learner
from retrain.config import TrainConfig
from retrain.distributed import World
from retrain.model.full import trained_weights
from retrain.model.fused import FusedDecoder
from retrain.model.load import load_base_model
from retrain.types import Float32Array, MachineChoices, Row

VOCABULARY = 61
EOS = 3


@cache
def model_folder(family: str) -> str:
    """A random model of two layers, saved once a session."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    configs: dict[str, Any] = {
        "qwen3": lambda: transformers.Qwen3Config(**shape, tie_word_embeddings=True),
        "llama": lambda: transformers.LlamaConfig(**shape, tie_word_embeddings=False),
        "biased": lambda: transformers.LlamaConfig(**shape, attention_bias=True, mlp_bias=True),
        "gemma2": lambda: transformers.Gemma2Config(
            **shape, final_logit_softcapping=2.0, sliding_window=6
        ),
        "cohere": lambda: transformers.CohereConfig(
            **{key: value for key, value in shape.items() if key != "head_dim"},
            logit_scale=0.25,
            use_qk_norm=False,
        ),
        "opt": lambda: transformers.OPTConfig(
            **{k: v for k, v in shape.items() if k not in ("head_dim", "intermediate_size")},
            ffn_dim=48,
            word_embed_proj_dim=32,
            dropout=0.3,
        ),
        "granite": lambda: transformers.GraniteConfig(
            **{k: v for k, v in shape.items() if k != "head_dim"}, logits_scaling=3.0
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(configs[family]())
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(
                    0, 0.3
                )  # logits far from uniform, so that a wrong formula shows
    folder = Path(mkdtemp(prefix="retrain-test-"))
    atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    model.save_pretrained(folder / family)
    return str(folder / family)


def config_for(family: str = "qwen3", **sections: dict[str, Any]) -> TrainConfig:
    """lr = 0 unless given: an update then leaves its gradient and nothing else."""
    values: dict[str, dict[str, Any]] = {
        "backend": {"devices": "cpu"},
        "model": {"model": model_folder(family), "lora_rank": 4},
        "training": {"seed": 11, "lr": 0.0, "temperature": 0.7, "max_tokens": 12, "group_size": 3},
        "algorithm": {"transform_mode": "none"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return TrainConfig.model_validate(values)


def make_learner(
    config: TrainConfig,
    micro_batch_tokens: int = 4096,
    *,
    untouched: bool = False,
    checkpointing: bool = False,
    fused: bool = True,
    merge: bool = False,
) -> Learner:
    """`untouched` leaves the adapter's B at zero; otherwise both matrices hold numbers, so that
    both have gradients.
    """
    base = load_base_model(config, config.model.model, torch.device("cpu"))
    trained = trained_weights(base, config)
    if trained.frozen_layers and not untouched:
        rng = np.random.default_rng(5)
        for parameter in trained.parameters.values():
            parameter.data = torch.from_numpy(
                rng.normal(0, 0.1, parameter.shape).astype(np.float32)
            )
    choices = MachineChoices(
        threads=1,
        decode_rows=8,
        decode_tokens=4096,
        micro_batch_tokens=micro_batch_tokens,
        gradient_checkpointing=checkpointing,
    )
    return Learner(
        base, trained, config, choices, FusedDecoder.of(base.model, merge=merge) if fused else None
    )


def make_rows(count: int = 7, seed: int = 0, longest: int = 12) -> list[Row]:
    """Rows of different lengths, among them one of two turns and one that ends in EOS."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        prompt, actions = int(rng.integers(2, 9)), int(rng.integers(2, longest))
        ids = rng.integers(4, VOCABULARY, prompt + actions + 3).astype(np.int32)
        spans: tuple[tuple[int, int], ...] = ((prompt, prompt + actions),)
        if index == 1:
            spans = ((prompt, prompt + 1), (prompt + 3, prompt + actions + 2))
        stop = spans[-1][1]
        total = sum(end - start for start, end in spans)
        if index == 2:
            ids[stop - 1] = EOS
        rows.append(
            Row(
                ids[:stop],
                spans,
                rng.normal(-2, 1, total).astype(np.float32),
                rng.normal(0, 1, total).astype(np.float32),
                group=index // 3,
                sample=index % 3,
            )
        )
    return rows


def with_logprobs(
    rows: Sequence[Row], logprobs: Sequence[Float32Array], noise: float = 0.0, seed: int = 1
) -> list[Row]:
    """The rows as if a sampler near the learner had recorded them."""
    rng = np.random.default_rng(seed)
    return [
        replace(row, logprobs=(own + noise * rng.normal(size=len(own))).astype(np.float32))
        for row, own in zip(rows, logprobs, strict=True)
    ]


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Of the last update."""
    return {
        name: parameter.grad.clone()
        for name, parameter in learner.weights.parameters.items()
        if parameter.grad is not None
    }


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """||ours - theirs|| / ||theirs|| over all adapter parameters."""
    assert ours.keys() == theirs.keys()
    difference = sum(
        float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours
    )
    size = sum(float(theirs[name].double().square().sum()) for name in ours)
    assert size > 0
    return float((difference / size) ** 0.5)


def silent(rows: list[Row], *, trained: bool = False) -> list[Row]:
    """The same completions in a group with equal rewards; they are `trained` where the loss has a
    KL or entropy term.
    """
    return [
        replace(row, advantages=np.zeros(row.num_actions, np.float32), counted=0, trained=trained)
        for row in rows
    ]


def mixed(learner: Learner, *, trained: bool = True) -> tuple[list[Row], list[Row]]:
    """Rows with an advantage, and silent ones."""
    rows = on_policy(learner, advantage=None)
    return rows[:4], silent(rows[4:], trained=trained)


@dataclass(frozen=True)
class OneOfTwo(World):
    """One of two processes whose messages do not travel: its gradient and its counts are its own
    share.
    """

    size: int = 2
    sent: list[Any] = field(default_factory=list)

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def sum(self, tensors: Any) -> None:
        self.sent.append([tensor.detach().clone() for tensor in tensors])


def on_policy(learner: Learner, advantage: float | None = 1.0) -> list[Row]:
    """Rows whose ratio is 1; all of their tokens have `advantage`, where it is given."""
    rows = make_rows()
    rows = with_logprobs(rows, learner.logprobs(rows))
    return (
        rows
        if advantage is None
        else [
            replace(row, advantages=np.full(row.num_actions, advantage, np.float32)) for row in rows
        ]
    )
