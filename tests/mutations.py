"""One-line faults in losses, advantages and masking that some test must notice; tools/mutate.py applies them.

Each is a mistake that somebody has made: a sign, a missing mask, min for max, a shift by one token, a mean of means.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """Replace `before`, which stands exactly once in `file`, by `after`; one of `tests` must then fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]


KL = ("tests/unit/test_kl.py", "tests/property/test_ragged_maths.py")
FORWARD = ("tests/unit/test_forward.py",)
CRITIC = ("tests/stages/test_critic.py",)
SCORE = ("tests/stages/test_score.py",)
WORST = ("tests/stages/test_score.py::test_the_worst_tokens_are_listed_by_size",)

MUTATIONS = [
    Mutation("rlhf_core/algorithms/kl.py", "k2: PerToken = d * d / 2", "k2: PerToken = d * d", KL),
    # Positions: the state before a token predicts it and has its value; the state after the last one bootstraps.
    Mutation(
        "rlhf_core/models/batching.py",
        "first = place * width + len(prompt) - 1",
        "first = place * width + len(prompt)",
        FORWARD,
    ),
    Mutation(
        "rlhf_core/models/batching.py",
        "ends.append(place * width + total - 1)",
        "ends.append(place * width + total - 2)",
        FORWARD,
    ),
    Mutation("rlhf_core/models/forward.py", "else logits / temperature", "else logits * temperature", FORWARD),
    # The full KL.
    Mutation(
        "rlhf_core/models/forward.py",
        "pieces.append(_kl_of_rows(log_p, log_q))",
        "pieces.append(_kl_of_rows(log_q, log_p))",
        FORWARD,
    ),
    Mutation("rlhf_core/models/forward.py", "log_q.exp() - p + p * d, near", "log_q.exp() + p * d, near", FORWARD),
    Mutation(
        "rlhf_core/models/forward.py",
        "rows = max(1, logits_chunk_tokens // 2)",
        "rows = 2 * logits_chunk_tokens",
        FORWARD,
    ),
    # Critics.
    Mutation(
        "rlhf_core/models/critic.py", "head.bias.fill_((bias - mean) / std)", "head.bias.fill_(bias / std)", CRITIC
    ),
    Mutation("rlhf_core/models/critic.py", "score.weight.float() / std", "score.weight.float()", CRITIC),
    Mutation(
        "rlhf_core/models/critic.py", "first[:, :-1], second[:, :-1], atol", "first[:, :0], second[:, :0], atol", CRITIC
    ),
    Mutation("stages/init_critic.py", "if hash_tokenizer(directory) != hash_tokenizer(POLICY):", "if False:", CRITIC),
    Mutation(
        "rlhf_core/reward/passes.py", "[float(row[-1]) for row in rows]", "[float(row[0]) for row in rows]", CRITIC
    ),
    # The score stage.
    Mutation("stages/score.py", "return [chain[-1 - steps] for", "return [chain[-steps] for", SCORE),
    Mutation("stages/score.py", "for name in numbered(sources[:1])])", "for name in numbered(sources)])", SCORE),
    Mutation("stages/score.py", "if found[name] != expected:", "if False:", SCORE),
    Mutation("rlhf_core/reward/scores.py", "np.argsort(-np.abs(difference)", "np.argsort(-difference", WORST),
    Mutation(
        "rlhf_core/reward/scores.py",
        "np.subtract(sampler_logprobs, logprobs, dtype",
        "np.subtract(logprobs, sampler_logprobs, dtype",
        WORST,
    ),
]
