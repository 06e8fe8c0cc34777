"""docs/coming-from.md: the names of other trainers beside retrain's keys, made from
retrain/config/synonyms.toml.
"""

from retrain.config.names import ABSENT, SYNONYMS, bracketed

INTRODUCTION = """\
# Coming from TRL, verl, prime-rl

Write a run that you know from another trainer as a retrain file.

```toml
# TRL: GRPOConfig(num_generations=8, max_completion_length=1024,
#                 learning_rate=1e-5, num_iterations=2, epsilon=0.2, beta=0.01)
# verl: rollout.n=8, max_response_length=1024, optim.lr=1e-5, ...
[model]
model = "Qwen/Qwen3-4B-Instruct-2507"

[data]
source = "gsm8k"

[algorithm]
# The field's GRPO, which divides by the standard deviation of the group.
advantage_mode = "grpo_std"
transform_mode = "none"

[training]
# Prompts per step, not completions.
batch_size = 16
group_size = 8
max_tokens = 1024
temperature = 1.0
lr = 1e-5
updates_per_batch = 2

[loss]
mode = "ppo"
clip_low = 0.2
clip_high = 0.2
kl_coef = 0.01
# "k2" has the gradient of TRL's KL term on policy. For verl's low_var_kl write "k3".
kl_estimator = "k2"
max_grad_norm = 1.0
```

retrain answers a foreign name with its own key before a run starts:
`[training] num_generations is not a key; did you mean group_size?`

So paste your settings, run `retrain explain my.toml`, and follow the sentences. They give the names;
translate the values by the tables below.

!!! warning "The same word, another meaning"
    - `advantage_mode = "grpo"` does not divide by the standard deviation. TRL and verl do by default:
      write `"grpo_std"`.
    - `batch_size` counts prompts. TRL's count completions of one pass, before accumulation.
    - TRL without `peft_config` trains all weights: `[model] train = "full"`.
    - TRL's `loss_type = "dapo"` is an aggregation. `algorithm_mode = "dapo"` is the paper's whole recipe.
    - `minibatches` counts updates. verl's `ppo_mini_batch_size` is a size.
    - The defaults are `temperature = 0.7` and no gradient clipping. Other trainers use 1.0 and a clip.
    - Means leave out groups with equal rewards. TRL counts their tokens.

## Values

| there | here |
|---|---|
| verl `norm_adv_by_std_in_grpo = True` | `advantage_mode = "grpo_std"` |
| verl `seq-mean-token-mean` | `[loss] aggregation = "sequence_mean"` |
| verl `token-mean` | `[loss] aggregation = "token_mean"` |
| verl `seq-mean-token-sum-norm` | `[loss] aggregation = "constant"` |
| TRL `beta` | `[loss] kl_coef`, `kl_estimator = "k2"`, with the same gradient on policy |
| verl `kl_loss_type = "low_var_kl"` | `[loss] kl_estimator = "k3"` |
| TRL `importance_sampling_level = "sequence"` | `[loss] mode = "gspo"` |
| TRL `vllm_importance_sampling_correction`, verl `rollout_is` | `[loss] correction`, such as `"tis"`, with `old_logprobs = "recomputed"` |
| TRL `GRPOTrainer(reward_funcs=f)` | `retrain.train(config, reward=f)`, or a [reward](plugins.md#a-reward) |

For a whole method, name its recipe, such as `algorithm_mode = "dapo"`: [papers](papers.md).

## Metrics

| TRL, verl, prime-rl | in `metrics.jsonl` |
|---|---|
| `reward` | `mean_reward` |
| `entropy`, `actor/entropy` | `entropy_mean` |
| 1 - `frac_reward_zero_std` | `informative_fraction` |
| `completions/clipped_ratio`, `response_length/clip_ratio` | `truncated_fraction` |
| `completions/mean_length`, `response_length/mean` | `completion_tokens_mean` |
| `clip_ratio/region_mean`, `actor/pg_clipfrac` | `clip_fraction` |
| `sampling/sampling_logp_difference/mean` | `logprob_diff_mean` |
| `timing_s/gen` | `time_sample_s` |

## Keys

`make docs` writes both tables from `retrain/config/synonyms.toml`. `retrain help NAME` explains each name.

| elsewhere | here |
|---|---|
"""

ABSENT_HEADING = """
## What retrain does not have

| name | instead |
|---|---|
"""


def coming_from_document() -> str:
    """The text of docs/coming-from.md."""
    keys = {name: f"`{bracketed(key)}`" for name, key in SYNONYMS.items()}
    return INTRODUCTION + _rows(keys) + ABSENT_HEADING + _rows(ABSENT)


def _rows(meanings: dict[str, str]) -> str:
    names: dict[str, str] = {}
    for name, meaning in meanings.items():
        shown = f"`{bracketed(name) if '.' in name else name}`"
        names[meaning] = f"{names[meaning]}, {shown}" if meaning in names else shown
    return "".join(f"| {others} | {meaning} |\n" for meaning, others in names.items())
