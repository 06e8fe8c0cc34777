"""The gradients of retrain's losses, compared with the loss functions of TRL and verl.

    .venv-peers/bin/python benchmarks/agree.py

All get the same adapter, completions of different lengths, and advantages. The sampler's log-probs
are up to 0.5 nats off, so that every clip acts. The peers take log-probs from transformers, one row
at a time; retrain's learner packs the rows. A case names what differs from the first case of its
peer. With `cap`, the old log-probs of a peer are its own, and its weights are at most `cap`.
TRL's KL term then has the gradient of k2, but another value.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent / "workers"))

import numpy as np
import torch
from learn import relative_error
from learn_worker import ours, reference, rows_of
from peft import PeftModel
from prepare import RANK, adapter
from report import add_output, load_average, publish, table, versions_line
from safetensors.numpy import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from worker import version_of

from retrain.model.text import LAB_MODEL
from retrain.system import toml_value

TOKENS, GROUP = 24, 4
PPO = {"mode": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}
TRL = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
VERL = {"loss": "vanilla", "loss_agg_mode": "token-mean", "clip_ratio_c": 100.0}
VERL |= {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
ROWS, CONSTANT = {"aggregation": "sequence_mean"}, {"aggregation": "constant"}
TRL_ROWS, VERL_ROWS = {"loss_type": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}
VERL_CONSTANT = {"loss_agg_mode": "seq-mean-token-sum-norm"}
TIS = {"correction": "tis", "correction_cap": 1.2, "old_logprobs": "recomputed"}
GSPO = ROWS | {"mode": "gspo", "clip_low": 0.01, "clip_high": 0.02}
TRL_GSPO = TRL_ROWS | {"importance_sampling_level": "sequence"}
TRL_GSPO |= {"epsilon": 0.01, "epsilon_high": 0.02}
VERL_GSPO = VERL_ROWS | {"loss": "gspo", "clip_ratio_low": 0.01, "clip_ratio_high": 0.02}
SAPO = ROWS | {"mode": "sapo", "params": {"tau_pos": 1.0, "tau_neg": 1.05}}
DPPO = {"mode": "dppo", "clip_low": 0.02, "clip_high": 0.02, "params": {"cap": 1.5}}
VERL_DPPO = {"loss": "dppo_tv", "clip_ratio_low": 0.02, "clip_ratio_high": 0.02}
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("TRL", TRL, PPO),
    ("TRL", {"loss_type": "bnpo"}, {}),
    ("TRL", TRL_ROWS, ROWS),
    ("TRL", {"loss_type": "dr_grpo"}, CONSTANT),
    ("TRL", {"delta": 1.5}, {"dual_clip": 1.5}),
    ("TRL", {"beta": 0.1, "use_bias_correction_kl": False}, {"kl_coef": 0.1}),
    ("TRL", {"beta": 0.1, "cap": 1.2}, TIS | {"kl_coef": 0.1, "kl_estimator": "k2"}),
    ("TRL", {"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    ("TRL", {"cap": 1.2}, TIS),
    ("TRL", TRL_GSPO, GSPO),
    (
        "TRL",
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"mode": "cispo", "clip_low": 0.0, "clip_high": 1.2},
    ),
    ("TRL", {"loss_type": "sapo"}, SAPO),
    ("verl", VERL, PPO),
    ("verl", {"loss_agg_mode": "token-sum"}, {"aggregation": "sum"}),
    ("verl", VERL_ROWS, ROWS),
    ("verl", VERL_CONSTANT, CONSTANT),
    ("verl", {"clip_ratio_c": 1.5}, {"dual_clip": 1.5}),
    ("verl", {"kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}, {"kl_coef": 0.1}),
    ("verl", {"kl_loss_coef": 0.1, "kl_loss_type": "mse"}, {"kl_coef": 0.1, "kl_estimator": "k2"}),
    ("verl", {"cap": 1.2}, TIS),
    ("verl", VERL_GSPO, GSPO),
    ("verl", {"loss": "geo_mean"}, ROWS | {"mode": "gmpo"}),
    ("verl", {"loss": "cispo"}, {"mode": "cispo", "clip_low": 0.8, "clip_high": 1.28}),
    ("verl", VERL_ROWS | {"loss": "sapo"}, SAPO),
    ("verl", VERL_DPPO | {"clip_ratio_c": 1.5}, DPPO),
)
"""A peer, its settings, and the same loss as `[loss]`. The first case of a peer has all settings,
and the later cases have what differs from it."""
HEAD = ("peer", "its settings", "`[loss]`", "loss difference", "gradient error")


def trl_loss(batch: dict[str, Tensor], given: dict[str, Any]) -> Tensor:
    """Call GRPOTrainer._compute_loss on a trainer with the attributes that it reads."""
    config = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **given)
    own = {
        "epsilon_low": config.epsilon,
        "max_completion_length": TOKENS,
        "steps_per_generation": 1,
    }
    own |= {"use_vllm": "weights" in batch, "model": SimpleNamespace(training=True)}
    trainer = SimpleNamespace(**(vars(config) | own))
    trainer.args = trainer
    trainer.aux_loss_enabled, trainer.current_gradient_accumulation_steps = False, 1
    trainer._entropy_bonus_enabled = config.entropy_coef != 0
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        batch["new"],
        batch["entropy"],
        None,
    )
    trainer.accelerator = SimpleNamespace(num_processes=1, sync_gradients=True)
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda value, **_: value
    mask = batch["mask"].long()
    return GRPOTrainer._compute_loss(
        trainer,
        None,
        dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), mask)
        | {"advantages": batch["advantages"][:, 0], "num_items_in_batch": mask.sum()}
        | {"old_per_token_logps": batch["old"], "ref_per_token_logps": batch["reference"]}
        | {"importance_sampling_ratio": batch.get("weights")},
    )


def verl_loss(batch: dict[str, Tensor], given: dict[str, Any]) -> Tensor:
    """Call the policy loss that `given` names, and add its KL loss."""
    loss, mean = given.pop("loss"), given.pop("loss_agg_mode")
    config = ActorConfig(strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, **given)
    config.global_batch_info["loss_scale_factor"] = TOKENS
    new, old, mask = batch["new"], batch["old"], batch["mask"]
    policy, _ = core_algos.get_policy_loss_fn(loss)(
        old, new, batch["advantages"], mask, mean, config, batch.get("weights")
    )
    kl = core_algos.kl_penalty(new, batch["reference"], config.kl_loss_type)
    share = config.kl_loss_coef if "kl_loss_coef" in given else 0.0
    return policy + share * core_algos.agg_loss(kl, mask, mean, **config.global_batch_info)


class Peers:
    """The model with the adapter, which transformers computes one row at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rows, self.sampler = rows_of(settings), load_file(settings["logprobs"])
        base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, settings["adapter"], is_trainable=True).eval()

    def logprobs(self) -> list[Tensor]:
        """Return the log-probs [B, T] of the completions' tokens, and the entropies [B, T]."""
        found = []
        for number, completion in enumerate(self.rows.completions):
            prompt = self.rows.prompt_of(number)
            ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
            every = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = every.gather(-1, ids[0, len(prompt) :, None])[:, 0]
            found.append((chosen, -(every.exp() * every).sum(-1)))
        return [pad_sequence(part, batch_first=True) for part in zip(*found, strict=True)]

    def gradient(self, peer: str, given: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
        """Return a loss of `peer`, and its gradient by parameter."""
        with torch.no_grad(), self.model.disable_adapter():
            batch = {"reference": self.logprobs()[0]}
        batch["new"], batch["entropy"] = self.logprobs()
        drawn = [torch.from_numpy(self.sampler[name]) for name in sorted(self.sampler)]
        batch["old"] = pad_sequence(drawn, batch_first=True)
        batch["mask"] = pad_sequence([torch.ones_like(one) for one in drawn], batch_first=True)
        batch["advantages"] = torch.from_numpy(self.rows.advantages)[:, None] * batch["mask"]
        if cap := given.pop("cap", 0.0):
            moved = (batch["new"].detach() - batch["old"]) * batch["mask"]
            batch |= {"old": batch["new"].detach(), "weights": moved.exp().clamp(max=cap)}
        self.model.zero_grad()
        loss = {"TRL": trl_loss, "verl": verl_loss}[peer](batch, given)
        loss.backward()
        named = [(name, one.grad) for name, one in self.model.named_parameters()]
        return loss.item(), {
            name.replace(".default.", "."): grad.numpy() for name, grad in named if grad is not None
        }


def words(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{name} = {toml_value(value)}`" for name, value in settings.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser)
    arguments, load, found = parser.parse_args(), load_average(), []
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("adapter", "logprobs", "gradient")}
        settings = {"model": str(LAB_MODEL), "rank": RANK, "training": {}, "staleness": 0.5} | files
        settings |= {"prompts": 4, "group": GROUP, "tokens": TOKENS, "ragged": True}
        settings |= adapter(settings["model"], files["adapter"])
        reference(settings)(files)
        peers = Peers(settings)
        for name, given, own in CASES:
            loss, gradient = peers.gradient(name, {"TRL": TRL, "verl": VERL}[name] | given)
            result = ours(settings | {"loss": PPO | own})(files)
            error = relative_error(load_file(files["gradient"]), gradient)
            difference = f"{abs(result['loss'] - loss):.0e}"
            found.append((name, words(given), words(own), difference, f"{error:.1e}"))
            print(*found[-1], flush=True)
    title = f"The gradient of {len(CASES)} losses, retrain compared with TRL and verl"
    versions = {name: version_of(name) for name in ("trl", "verl", "torch", "transformers")}
    about = f"The lab model, fp32, LoRA r{RANK}, 16 completions of 3 to {TOKENS} tokens."
    about += " With `cap`, TRL's KL term has the gradient of k2, but another value."
    text = [f"{about} {versions_line(versions)}.", table(HEAD, found)]
    publish("agree-lab", title, text, load, arguments.output)


if __name__ == "__main__":
    main()
