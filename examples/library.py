r"""The library in one page: the same loop as rl_loop.py from retrain's own parts, with token-level
credit.

    python examples/library.py --steps 10

`rollout = draw(...)`, `rows = assign(...).rows()`, `result = train(...)`: the nouns of
`retrain/types.py` go from call to call. What `retrain my.toml` adds is the run around them: its
folder, checkpoints, evaluation, parity gate and signals.
"""

import argparse
from contextlib import closing

from retrain.advantages.pipeline import CreditPipeline
from retrain.config import config_from_mapping
from retrain.data import encode_prompts, load_examples
from retrain.model.text import load_text_model
from retrain.rewards import build_scorer
from retrain.run.dialogues import Watcher
from retrain.run.parts import build_backend, training_plan
from retrain.run.rollout import Sampler

CONFIG = {
    "model": {"model": "lab", "lora_rank": 16},
    "data": {"source": "lab"},
    "reward": {"type": "match"},
    "algorithm": {"advantage_mode": "grpo", "transform_mode": "gtpo"},
    "training": {"batch_size": 32, "group_size": 4, "max_tokens": 96, "lr": 1e-3, "seed": 0},
    "loss": {"max_grad_norm": 1.0},
}


def main(steps: int = 10, **training: int) -> list[float]:
    """Train, print one line per step, and return the mean reward of each."""
    config = config_from_mapping({**CONFIG, "training": {**CONFIG["training"], **training}})
    text = load_text_model(config.model)
    prompts = encode_prompts(config.training, text, load_examples(config, "train"))
    credit = CreditPipeline(config, text.vocabulary.pieces)
    history, watcher = [], Watcher(check=lambda: None, completion=lambda completion: None)
    with (
        build_scorer(config) as scorer,
        closing(build_backend(config, text.eos_ids, None, log=print)) as backend,
    ):
        sampler = Sampler(backend.engine, scorer, text.vocabulary.text)
        for step in range(steps):
            batch = prompts.batch(
                step * config.training.batch_size, config.training.batch_size, config.training.seed
            )
            # Groups of token ids, log-probs, texts and scores; then one advantage per token; then
            # one optimizer step, normalized once.
            rollout = sampler.draw(batch, step, training_plan(config.training), watcher)
            rows = credit.assign(rollout.usable_groups, step, sepa_lambda=0.0).rows()
            result = backend.train(rows, step)
            rewards = [reward for group in rollout.groups for reward in group.judged().rewards]
            history.append(sum(rewards) / len(rewards))
            print(
                f"Step {step} | reward={history[-1]:.3f} | loss={result.loss} |"
                f" ratio_max={result.ratio_max} | rows={len(rows)}"
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="retrain's parts without its trainer.")
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args().steps)
