"""Guess the meaning of an unknown name: the nearest known one, or the key that has this name in
other trainers.
"""

from collections.abc import Iterable
from difflib import get_close_matches

SYNONYMS: dict[str, str] = {
    # TRL, transformers
    "model_name": "model.model",
    "model_name_or_path": "model.model",
    "pretrained_model": "model.model",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "load_in_8bit": "model.load_in_4bit",
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.lr_schedule",
    "lr_scheduler": "training.lr_schedule",
    "warmup_steps": "training.lr_warmup_steps",
    "lr_warmup": "training.lr_warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "grad_clip": "loss.max_grad_norm",
    "gradient_clipping": "loss.max_grad_norm",
    "clip_grad": "loss.max_grad_norm",
    "num_generations": "training.group_size",
    "generations": "training.group_size",
    "rollout_n": "training.group_size",
    "rollouts_per_example": "training.group_size",
    "n_samples_per_prompt": "training.group_size",
    "samples_per_prompt": "training.group_size",
    "num_rollouts": "training.group_size",
    "per_device_train_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "rollout_batch_size": "training.batch_size",
    "groups_per_batch": "training.batch_size",
    "num_prompts": "training.batch_size",
    "gradient_accumulation_steps": "training.micro_batch_tokens",
    "ppo_mini_batch_size": "training.minibatches",
    "mini_batch_size": "training.minibatches",
    "num_minibatches": "training.minibatches",
    "ppo_micro_batch_size_per_gpu": "training.micro_batch_tokens",
    "micro_batch_size": "training.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "training.micro_batch_tokens",
    "num_iterations": "training.updates_per_batch",
    "ppo_epochs": "training.updates_per_batch",
    "num_train_epochs": "training.max_steps",
    "num_epochs": "training.max_steps",
    "epochs": "training.max_steps",
    "total_epochs": "training.max_steps",
    "total_training_steps": "training.max_steps",
    "num_steps": "training.max_steps",
    "iterations": "training.max_steps",
    "max_completion_length": "training.max_tokens",
    "max_response_length": "training.max_tokens",
    "response_length": "training.max_tokens",
    "max_new_tokens": "training.max_tokens",
    "max_length": "training.max_tokens",
    "save_steps": "training.save_every",
    "save_freq": "training.save_every",
    "save_interval": "training.save_every",
    "save_total_limit": "training.keep_checkpoints",
    "max_train_samples": "training.max_examples",
    "filter_groups": "training.dynamic_sampling",
    "overlong_filtering": "loss.mask_truncated",
    "mask_truncated_completions": "loss.mask_truncated",
    "beta": "loss.kl_coef",
    "kl_beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "kl_penalty_coef": "loss.kl_coef",
    "kl_loss_type": "loss.kl_estimator",
    "epsilon": "loss.clip_low",
    "cliprange": "loss.clip_low",
    "clip_range": "loss.clip_low",
    "clip_eps": "loss.clip_low",
    "clip_ratio": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "entropy_coeff": "loss.entropy_coef",
    "loss_type": "loss.mode",
    "loss_fn": "loss.mode",
    "loss_agg_mode": "loss.aggregation",
    "importance_sampling_level": "loss.mode",
    "adv_estimator": "algorithm.advantage_mode",
    "advantage_estimator": "algorithm.advantage_mode",
    "algo": "algorithm.advantage_mode",
    "algorithm": "algorithm.advantage_mode",
    "advantage": "algorithm.advantage_mode",
    "transform": "algorithm.transform_mode",
    "top_entropy_quantile": "algorithm.surprisal_mask_rho",
    # PEFT
    "r": "model.lora_rank",
    "rank": "model.lora_rank",
    "alpha": "lora.alpha",
    "lora_r": "model.lora_rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    # data, rewards, evaluation
    "dataset": "data.source",
    "dataset_name": "data.source",
    "train_file": "data.source",
    "train_files": "data.source",
    "prompt_key": "data.prompt_column",
    "answer_key": "data.answer_column",
    "reward_fn": "reward.type",
    "reward_func": "reward.type",
    "reward_funcs": "reward.type",
    "reward_weights": "reward.weights",
    "eval_steps": "evaluation.every",
    "eval_every": "evaluation.every",
    "eval_interval": "evaluation.every",
    "test_freq": "evaluation.every",
    "val_before_train": "evaluation.at_start",
    "eval_on_start": "evaluation.at_start",
    "val_files": "evaluation.source",
    # folders, trackers, engines
    "output": "logging.log_dir",
    "output_dir": "logging.log_dir",
    "out_dir": "logging.log_dir",
    "run_name": "logging.wandb_run_name",
    "report_to": "logging.trackers",
    "logger": "logging.trackers",
    "project_name": "logging.wandb_project",
    "entity": "logging.wandb_entity",
    "resume_from_checkpoint": "resume.from",
    "resume_from": "resume.from",
    "device": "backend.devices",
    "gpus": "backend.devices",
    "vllm_mode": "inference.engine",
    "use_vllm": "inference.engine",
    "rollout_engine": "inference.engine",
    "attn_implementation": "inference.attention_kernel",
    "vllm_server_base_url": "inference.url",
    "random_seed": "training.seed",
    "backend_opt": "backend.options",
    "backend_option": "backend.options",
    # short forms, verl, OpenRLHF, prime-rl
    "pretrain": "model.model",
    "pretrained": "model.model",
    "model_path": "model.model",
    "base_model": "model.model",
    "fp16": "model.dtype",
    "precision": "model.dtype",
    "quantization": "model.load_in_4bit",
    "actor_lr": "training.lr",
    "actor_learning_rate": "training.lr",
    "schedule": "training.lr_schedule",
    "scheduler": "training.lr_schedule",
    "warmup": "training.lr_warmup_steps",
    "warmup_ratio": "training.lr_warmup_steps",
    "lr_warmup_ratio": "training.lr_warmup_steps",
    "lr_warmup_steps_ratio": "training.lr_warmup_steps",
    "wd": "training.weight_decay",
    "betas": "optimizer.beta1",
    "adam_betas": "optimizer.beta1",
    "adam_eps": "optimizer.eps",
    "max_norm": "loss.max_grad_norm",
    "n": "training.group_size",
    "g": "training.group_size",
    "gs": "training.group_size",
    "group": "training.group_size",
    "rollouts": "training.group_size",
    "completions": "training.group_size",
    "num_completions": "training.group_size",
    "completions_per_prompt": "training.group_size",
    "n_samples": "training.group_size",
    "num_samples": "training.group_size",
    "samples_per_problem": "training.group_size",
    "bs": "training.batch_size",
    "batch": "training.batch_size",
    "prompts": "training.batch_size",
    "prompts_per_step": "training.batch_size",
    "gradient_accumulation": "training.micro_batch_tokens",
    "grad_accum": "training.micro_batch_tokens",
    "micro_train_batch_size": "training.micro_batch_tokens",
    "mu": "training.updates_per_batch",
    "step": "training.max_steps",
    "steps": "training.max_steps",
    "total_steps": "training.max_steps",
    "train_steps": "training.max_steps",
    "training_steps": "training.max_steps",
    "max_epochs": "training.max_steps",
    "num_episodes": "training.max_steps",
    "total_episodes": "training.max_steps",
    "temp": "training.temperature",
    "generate_max_len": "training.max_tokens",
    "max_len": "training.max_tokens",
    "seq_len": "training.max_tokens",
    "max_seq_length": "training.max_tokens",
    "ckpt_interval": "training.save_every",
    "checkpoint_every": "training.save_every",
    "keep": "training.keep_checkpoints",
    "checkpoints": "training.keep_checkpoints",
    "max_ckpt_num": "training.keep_checkpoints",
    "activation_checkpointing": "training.gradient_checkpointing",
    "enable_gradient_checkpointing": "training.gradient_checkpointing",
    "max_samples": "training.max_examples",
    "kl": "loss.kl_coef",
    "kl_ctrl": "loss.kl_coef",
    "init_kl_coef": "loss.kl_coef",
    "use_kl_loss": "loss.kl_coef",
    "clip": "loss.clip_low",
    "eps_clip": "loss.clip_low",
    "eps_clip_low": "loss.clip_low",
    "eps_clip_high": "loss.clip_high",
    "entropy_bonus": "loss.entropy_coef",
    "adv": "algorithm.advantage_mode",
    "grpo": "algorithm.advantage_mode",
    "dr_grpo": "algorithm.advantage_mode",
    "method": "algorithm.advantage_mode",
    "scale_rewards": "algorithm.advantage_mode",
    "prompt_data": "data.source",
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
    "thinking": "data.chat_template_args",
    "enable_thinking": "data.chat_template_args",
    "env": "environment.provider",
    "environment": "environment.provider",
    "env_id": "environment.id",
    "reward": "reward.type",
    "reward_model": "reward.judge_model",
    "custom_reward_function": "reward.custom_function",
    "compute_score": "reward.custom_function",
    "num_workers": "reward.workers",
    "timeout": "inference.timeout_s",
    "eval_dataset": "evaluation.source",
    "eval_n": "evaluation.samples",
    "eval_samples": "evaluation.samples",
    "eval_freq": "evaluation.every",
    "val_freq": "evaluation.every",
    "eval_temperature": "evaluation.temperature",
    "eval_max_tokens": "evaluation.max_tokens",
    "max_eval_samples": "evaluation.max_examples",
    "save_dir": "logging.log_dir",
    "save_path": "logging.log_dir",
    "ckpt_path": "logging.log_dir",
    "run_dir": "logging.log_dir",
    "workdir": "logging.log_dir",
    "checkpoint_dir": "logging.log_dir",
    "wandb": "logging.trackers",
    "use_wandb": "logging.trackers",
    "with_tracking": "logging.trackers",
    "wandb_name": "logging.wandb_run_name",
    "experiment_name": "logging.wandb_run_name",
    "checkpoint": "resume.from",
    "continue": "resume.from",
    "load_checkpoint": "resume.from",
    "resume_path": "resume.from",
    "gpu": "backend.devices",
    "cpu": "backend.devices",
    "cuda": "backend.devices",
    "num_gpus": "backend.devices",
    "n_gpus_per_node": "backend.devices",
    "flash_attn": "inference.attention_kernel",
    "use_flash_attention": "inference.attention_kernel",
    "vllm": "inference.engine",
    "server_url": "inference.url",
    "api_base": "inference.url",
    "host": "inference.url",
    "port": "inference.url",
    "api_key": "inference.api_key_env",
    # what a name means inside one section
    "model.name": "model.model",
    "model.path": "model.model",
    "model.id": "model.model",
    "lora.rank": "model.lora_rank",
    "optimizer.epsilon": "optimizer.eps",
    "optimizer.betas": "optimizer.beta1",
    "evaluation.n": "evaluation.samples",
    "evaluation.num_samples": "evaluation.samples",
    "evaluation.num_generations": "evaluation.samples",
    "evaluation.dataset": "evaluation.source",
    "evaluation.steps": "evaluation.every",
    "evaluation.interval": "evaluation.every",
    "evaluation.freq": "evaluation.every",
    "evaluation.max_new_tokens": "evaluation.max_tokens",
    "evaluation.max_completion_length": "evaluation.max_tokens",
    "evaluation.temp": "evaluation.temperature",
    "data.name": "data.source",
    "data.file": "data.path",
    "sepa.step": "sepa.steps",
}
"""Names in other trainers (TRL, verl, OpenRLHF, prime-rl, transformers, PEFT) and short forms ->
the key that does the same or takes its place. "section.name" is what the name means in that section
alone. """

PREFIXES = {"bp_": "backpressure", "optim_": "optimizer", "tinker_": "backend"}
"""How flags begin in an earlier project of this name -> the section of the key that the rest
names."""

_CRITIC = "there is no critic and no discount: advantages come from the rewards of a prompt's group"
_SERVER = "it is a setting of the inference server, whose command `retrain serve` prints"
_REFERENCE = "the KL term's reference is the frozen base model; --loss-kl-coef is its weight"
_ALWAYS = "every step is recorded in metrics.jsonl"
_FILE = "the configuration's file needs no flag: retrain FILE.toml"
_OVERWRITE = "--overwrite empties the run's folder first"
_PROMPTS = "prompts are never cut; those that exceed the model's context are left out"
_POLICY = (
    "sampling follows the trained distribution; --temperature, --top-k, --top-p and --min-p"
    " shape it"
)

ABSENT: dict[str, str] = {
    "gamma": _CRITIC,
    "lam": _CRITIC,
    "lambd": _CRITIC,
    "gae_lambda": _CRITIC,
    "critic_learning_rate": _CRITIC,
    "tp": _SERVER,
    "tensor_parallel_size": _SERVER,
    "tensor_model_parallel_size": _SERVER,
    "vllm_tensor_parallel_size": _SERVER,
    "gpu_memory_utilization": _SERVER,
    "vllm_gpu_memory_utilization": _SERVER,
    "max_model_len": _SERVER,
    "ref_model": _REFERENCE,
    "reference_model": _REFERENCE,
    "sync_ref_model": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "ref_update_steps": _REFERENCE,
    "logging_steps": _ALWAYS,
    "log_freq": _ALWAYS,
    "log_every": _ALWAYS,
    "log_interval": _ALWAYS,
    "config": _FILE,
    "config_file": _FILE,
    "config_path": _FILE,
    "file": _FILE,
    "force": _OVERWRITE,
    "yes": _OVERWRITE,
    "overwrite_output_dir": _OVERWRITE,
    "dry_run": "`retrain explain FILE.toml` says what a configuration would do, and trains nothing",
    "optim": "the optimizer is AdamW",
    "optimizer": "the optimizer is AdamW",
    "repetition_penalty": _POLICY,
    "do_sample": _POLICY,
    "max_prompt_length": _PROMPTS,
    "max_prompt_len": _PROMPTS,
    "prompt_max_len": _PROMPTS,
    "no_eval": "--evaluation-every 0 --no-evaluation-at-end leaves evaluations out",
    "sft_": (
        "there is no supervised warm-up: [lora] init_from begins with an adapter that was trained"
        " elsewhere"
    ),
    "stop_strings": "a completion ends at the model's end-of-sequence tokens or at --max-tokens",
    "stop_tokens": "a completion ends at the model's end-of-sequence tokens or at --max-tokens",
    "eos_token": "a completion ends at the model's end-of-sequence tokens or at --max-tokens",
}
"""Names in other trainers that no key takes the place of, or with "_" how such names begin -> what
is done instead, as a clause."""

NAME_CUTOFF = 0.75
"""Least similarity between a mistyped name and a key. Below it, most guesses name a key that was
not meant."""


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate closest to a mistyped word, or None when none is close. Case is ignored."""
    names = {name.lower(): name for name in candidates}
    close = get_close_matches(word[:_LONGEST].lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


_LONGEST = 100
"""Characters that are compared: no name is longer, and comparing takes quadratic time."""


def synonym(name: str, section: str = "") -> str | None:
    """The "section.key" for a name in another trainer, None for any other name; dashes count as
    underscores.
    """
    word = _word(name)
    prefixed = (
        f"{home}.{word.removeprefix(prefix)}"
        for prefix, home in PREFIXES.items()
        if word.startswith(prefix) and not section
    )
    return SYNONYMS.get(f"{section}.{word}") or SYNONYMS.get(word) or next(prefixed, None)


def instead(name: str) -> str:
    """Say, as a clause, what is done in place of another trainer's setting that has no key here; ""
    for any other name.
    """
    word = _word(name)
    return ABSENT.get(word) or ABSENT.get(f"{word.partition('_')[0]}_", "")


def _word(name: str) -> str:
    return name.lower().replace("-", "_")
