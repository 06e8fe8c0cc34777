"""A method of one's own: examples/ab.toml compares it with GRPO."""


def winners_only(rewards: list[float]) -> list[float]:
    """Return GRPO's advantages without their negative half."""
    mean = sum(rewards) / len(rewards)
    return [max(reward - mean, 0.0) for reward in rewards]
