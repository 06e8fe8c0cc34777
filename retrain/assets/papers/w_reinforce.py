"""W-REINFORCE's advantage (arXiv 2506.01347): right and wrong answers have weights of their own."""


def weighted(rewards: list[float], params: dict[str, float]) -> list[float]:
    """`right` for a reward above 0 and -`wrong` for the others."""
    return [params["right"] if reward > 0 else -params["wrong"] for reward in rewards]
