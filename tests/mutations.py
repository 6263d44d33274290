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
LOSSES = ("tests/unit/test_losses.py",)
DIAGNOSTICS = ("tests/unit/test_diagnostics.py",)
PARTS = ("tests/unit/test_aggregation.py",)
UPDATE = ("tests/unit/test_ppo.py",)
LEARNER = ("tests/unit/test_learner.py",)
LOSSES_FILE = "rlhf_core/algorithms/losses.py"
AGGREGATION_FILE = "rlhf_core/algorithms/aggregation.py"
DIAGNOSTICS_FILE = "rlhf_core/algorithms/diagnostics.py"
PPO_LOSS_FILE = "rlhf_core/training/ppo_loss.py"
CLIPPED = "torch.maximum(-advantages * ratio, -advantages * clipped)"

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
    # The policy's loss.
    Mutation(LOSSES_FILE, CLIPPED, CLIPPED.replace("maximum", "minimum"), LOSSES),
    Mutation(LOSSES_FILE, CLIPPED, "-advantages * torch.minimum(ratio, clipped)", LOSSES),
    Mutation(LOSSES_FILE, CLIPPED, "torch.maximum(advantages * ratio, advantages * clipped)", LOSSES),
    Mutation(
        LOSSES_FILE, "clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range_high)", "clipped = ratio", LOSSES
    ),
    Mutation(
        LOSSES_FILE,
        "clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range_high)",
        "clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range)",
        LOSSES,
    ),
    Mutation(LOSSES_FILE, "torch.exp(torch.clamp(log_ratios", "torch.exp(torch.clamp(-log_ratios", LOSSES),
    Mutation(
        LOSSES_FILE,
        "torch.exp(torch.clamp(log_ratios, -LOG_RATIO_CAP, LOG_RATIO_CAP))",
        "torch.exp(log_ratios)",
        LOSSES,
    ),
    Mutation(
        LOSSES_FILE, "torch.where(advantages < 0, torch.minimum", "torch.where(advantages > 0, torch.minimum", LOSSES
    ),
    Mutation(LOSSES_FILE, "torch.minimum(losses, -advantages * dual_clip)", "-advantages * dual_clip", LOSSES),
    Mutation(LOSSES_FILE, "return importance_weights * losses", "return losses", LOSSES),
    Mutation(LOSSES_FILE, "row.mean().expand(len(row))", "row.sum().expand(len(row))", LOSSES),
    Mutation(LOSSES_FILE, "return means + (new_logprobs - fixed)", "return means", LOSSES),
    # KL and value loss.
    Mutation(LOSSES_FILE, "    d = new_logprobs - ref_logprobs\n", "    d = ref_logprobs - new_logprobs\n", LOSSES),
    Mutation(LOSSES_FILE, "torch.clamp(d, min=-LOG_RATIO_CAP)", "d", LOSSES),
    Mutation(LOSSES_FILE, "estimate = torch.square(d) / 2", "estimate = torch.square(d)", LOSSES),
    Mutation(LOSSES_FILE, "return factor * torch.maximum(errors", "return factor * torch.minimum(errors", LOSSES),
    Mutation(LOSSES_FILE, "return factor * torch.maximum(errors", "return torch.maximum(errors", LOSSES),
    Mutation(
        LOSSES_FILE,
        "torch.clamp(new_values, values - value_clip_range",
        "torch.clamp(new_values, returns - value_clip_range",
        LOSSES,
    ),
    Mutation(
        LOSSES_FILE, "functional.logsigmoid(chosen - rejected)", "functional.logsigmoid(rejected - chosen)", LOSSES
    ),
    # Parts of a minibatch.
    Mutation(
        AGGREGATION_FILE,
        "per_row = [1 / tokens for _ in lengths]",
        "per_row = [1 / sum(lengths) for _ in lengths]",
        PARTS,
    ),
    Mutation(
        AGGREGATION_FILE,
        "1 / (responses * length) for",
        "1 / (len(lengths) * length) for",
        PARTS,
    ),
    Mutation(
        AGGREGATION_FILE,
        "1 / (responses * constant) for _ in",
        "1 / (responses * length) for length in",
        PARTS,
    ),
    Mutation(
        PPO_LOSS_FILE,
        "return cls(len(rows), tokens, tokens + len(responses.slots(rows)))",
        "return cls(len(rows), tokens, tokens)",
        UPDATE,
    ),
    Mutation(PPO_LOSS_FILE, "+ settings.kl_loss_coef * kl_term", "- settings.kl_loss_coef * kl_term", UPDATE),
    # Diagnostics.
    Mutation(
        DIAGNOSTICS_FILE,
        "low = (advantage < 0) & (ratio < 1 - clip_range)",
        "low = ratio < 1 - clip_range",
        DIAGNOSTICS,
    ),
    Mutation(DIAGNOSTICS_FILE, "high = (advantage > 0) &", "high = (advantage < 0) &", DIAGNOSTICS),
    Mutation(DIAGNOSTICS_FILE, "torch.expm1(bounded) - bounded", "torch.expm1(-bounded) + bounded", DIAGNOSTICS),
    # The optimiser.
    Mutation("rlhf_core/training/learner.py", 'if not (critic_only and name == "policy")', "if True", LEARNER),
    Mutation(
        "rlhf_core/training/learner.py",
        'if "critic" in self.parts else set()',
        'if "critic" not in self.parts else set()',
        LEARNER,
    ),
    Mutation(
        "rlhf_core/training/optimizer.py", "first_moments=before.first_moments | first", "first_moments=first", LEARNER
    ),
]
