"""One-line faults in losses, advantages, masking and rewards that some test must notice; tools/mutate.py applies them.

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
REWARDS = ("tests/unit/test_rewards.py",)
STATE = ("tests/unit/test_reward_state.py",)
GAE = ("tests/unit/test_advantages.py",)
ESTIMATES = ("tests/unit/test_estimates.py",)
WHITENING = ("tests/unit/test_whitening.py",)
WEIGHTS = ("tests/unit/test_off_policy.py",)
ADVANTAGES = ("tests/stages/test_advantages.py",)
FORWARD = ("tests/unit/test_forward.py",)
HEAD = ("tests/unit/test_head.py",)
PACKING = ("tests/unit/test_packing.py",)
CHECKPOINTING = ("tests/unit/test_checkpointing.py",)
FUSING = ("tests/unit/test_fusing.py",)
FROZEN = ("tests/unit/test_frozen.py",)
CRITIC = ("tests/stages/test_critic.py",)
SCORE = ("tests/stages/test_score.py",)
WORST = ("tests/stages/test_score.py::test_the_worst_tokens_are_listed_by_size",)
LOSSES = ("tests/unit/test_losses.py",)
DIAGNOSTICS = ("tests/unit/test_diagnostics.py",)
PARTS = ("tests/unit/test_aggregation.py",)
UPDATE = ("tests/unit/test_ppo.py",)
LEARNER = ("tests/unit/test_learner.py",)
TEXTBOOK = ("tests/property/test_ppo_loss.py",)
RULES = ("tests/unit/test_reward_rules.py",)
LANGUAGE = ("tests/unit/test_language.py",)
FUNCTIONS = ("tests/unit/test_user_rewards.py",)
SERVICES = ("tests/unit/test_reward_services.py",)
SOURCES = ("tests/stages/test_reward_sources.py",)
HELD_OUT = ("tests/stages/test_evaluate.py",)
NONFINITE = ("tests/stages/test_nonfinite_scores.py",)
RANKING = ("tests/unit/test_ranking.py",)
KEPT = ("tests/unit/test_reward_model.py::test_what_is_kept_is_the_model_as_it_was_after_that_epoch",)
BY_HAND = ("tests/unit/test_reward_model.py::test_margin_smoothing_ties_and_centring_by_hand",)
REWARD_TEXT = ("tests/unit/test_reward_text.py",)
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
    Mutation("rlhf_core/models/head.py", "else logits.div_(temperature)", "else logits.mul_(temperature)", FORWARD),
    Mutation("rlhf_core/models/head.py", "one[part, None] / ctx.temperature for", "one[part, None] for", HEAD),
    Mutation("rlhf_core/models/head.py", "g + e * entropy[part, None]", "g", HEAD),
    Mutation("rlhf_core/models/head.py", "p.mul_(z[rows]).sum(-1)", "p.mul_(z[: len(p)]).sum(-1)", HEAD),
    Mutation("rlhf_core/models/head.py", "block.mul_(-e[rows])", "block.mul_(-e[: len(p)])", HEAD),
    Mutation("rlhf_core/models/head.py", "scatter_add_(-1, onehot[rows], g[rows]", "scatter_add_(-1, onehot, g", HEAD),
    Mutation("rlhf_core/models/head.py", "if dz is not z:", "if dz is z:", HEAD),
    Mutation("rlhf_core/models/head.py", "d_weight.addmm_(dz.T,", "d_weight.copy_(dz.T @", HEAD),
    Mutation("rlhf_core/models/head.py", "in reversed(_chunks(", "in (_chunks(", HEAD),
    Mutation("rlhf_core/models/head.py", "z, ctx.last = ctx.last, None", "z = ctx.last", HEAD),
    # Rows without pads, rounded weights, layers that run twice.
    Mutation("rlhf_core/models/packing.py", "is_causal=True", "is_causal=False", PACKING),
    Mutation("rlhf_core/models/batching.py", "<= (1 + pads) * total", "<= 2 * total", PACKING),
    Mutation("rlhf_core/models/batching.py", "min((1 + pads) * total,", "min(total,", FORWARD),
    Mutation(
        "rlhf_core/models/packing.py",
        "known.setdefault((before, token_id)",
        "known.setdefault((position, token_id)",
        PACKING,
    ),
    Mutation("rlhf_core/models/packing.py", "[tokens[row][-1]] * (width", "[0] * (width", PACKING),
    Mutation("rlhf_core/models/batching.py", "rectangle / _RECTANGLE", "0", FORWARD),
    Mutation("rlhf_core/models/packing.py", "positions.append(position)", "positions.append(len(positions))", PACKING),
    Mutation("rlhf_core/models/packing.py", "dtype=exact)", "dtype=gradient.dtype)", PACKING),
    Mutation("rlhf_core/models/packing.py", "rows.places, False)", "rows.places, True)", PACKING),
    Mutation("rlhf_core/models/packing.py", "nullcontext() if packed is None", "nullcontext() if True", CHECKPOINTING),
    Mutation("rlhf_core/models/frozen.py", " and torch.equal(before, after)", "", FROZEN),
    Mutation("rlhf_core/models/frozen.py", "_leave_file(model)", "pass", FROZEN),
    Mutation("rlhf_core/models/forward.py", " and not _pools(model)", "", FORWARD),
    Mutation("rlhf_core/models/checkpointing.py", "module.training = True", "pass", CHECKPOINTING),
    Mutation("rlhf_core/models/checkpointing.py", "not torch.equal(before, after)", "False", CHECKPOINTING),
    Mutation("rlhf_core/models/checkpointing.py", "version != hidden._version", "version is None", CHECKPOINTING),
    Mutation("rlhf_core/models/checkpointing.py", "if not torch.is_grad_enabled():", "if True:", CHECKPOINTING),
    Mutation("rlhf_core/models/fusing.py", "activation(gate) * up)", "activation(up) * gate)", FUSING),
    Mutation("rlhf_core/models/fusing.py", " or not _close(before, after, precision)", "", FUSING),
    # The full KL.
    Mutation(
        "rlhf_core/models/forward.py",
        "of_p[some].log_softmax(-1), of_q[some]",
        "of_q[some].log_softmax(-1), of_p[some]",
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
    Mutation("stages/score.py", "parts[: len(shard_paths(sources[0]))]", "parts[:]", SCORE),
    Mutation("stages/score.py", "if found[name] != expected:", "if False:", SCORE),
    Mutation("rlhf_core/reward/measures.py", "np.argsort(-np.abs(difference)", "np.argsort(-difference", WORST),
    Mutation(
        "rlhf_core/reward/measures.py",
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
    # Rewards and their state.
    Mutation(
        "rlhf_core/algorithms/kl.py",
        "d: PerToken = np.subtract(logprobs, ref_logprobs, dtype",
        "d: PerToken = np.subtract(ref_logprobs, logprobs, dtype",
        KL,
    ),
    Mutation(
        "rlhf_core/algorithms/kl.py",
        "np.maximum(d, -log_ratio_bound)",
        "np.minimum(d, log_ratio_bound)",
        KL,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "* -kl_coef",
        "* kl_coef",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "rewards[offsets[1:][filled] - 1] += scores[filled]",
        "rewards[offsets[1:] - 1] += scores",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "rewards[offsets[1:][filled] - 1] +=",
        "rewards[offsets[:-1][filled]] +=",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "return final - missing_eos_penalty * ~finished",
        "return final - missing_eos_penalty * finished",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "np.where(finished, final, final * (1 - missing_eos_penalty))",
        "np.where(finished, final, final * missing_eos_penalty)",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/rewards.py",
        "(lengths - (max_new_tokens - overlong_buffer))",
        "(lengths - max_new_tokens)",
        REWARDS,
    ),
    Mutation(
        "rlhf_core/algorithms/reward_state.py",
        "+ delta * delta * moments.count * count / total",
        "",
        STATE,
    ),
    Mutation(
        "rlhf_core/algorithms/reward_state.py",
        "max(kl / kl_target - 1, -ERROR_CLIP)",
        "max(1 - kl / kl_target, -ERROR_CLIP)",
        STATE,
    ),
    Mutation(
        "rlhf_core/algorithms/reward_state.py",
        "(1 + error * responses / kl_horizon)",
        "(1 + error * kl_horizon / responses)",
        STATE,
    ),
    Mutation(
        "rlhf_core/algorithms/iteration.py",
        "part.scores[part.own & part.filled]",
        "part.scores[part.filled]",
        ADVANTAGES,
    ),
    Mutation(
        "rlhf_core/algorithms/shaping.py",
        "(tokens > 0) & (tokens < max_new_tokens)",
        "(tokens > 0) & (tokens <= max_new_tokens)",
        ESTIMATES,
    ),
    # Advantages and whitening.
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "delta = rewards[t] + gamma * next_value - values[t]",
        "delta = rewards[t] + next_value - values[t]",
        GAE,
    ),
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "gamma * gae_lambda * next_advantage",
        "gae_lambda * next_advantage",
        GAE,
    ),
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "    for row in range(offsets.size - 1):\n        next_value = 0.0\n        next_advantage = 0.0\n",
        "    next_value = 0.0\n    next_advantage = 0.0\n    for row in range(offsets.size - 1):\n",
        GAE,
    ),
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "centred *= np.repeat(sizes / others, sizes)",
        "centred *= np.repeat(others / sizes, sizes)",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "np.add.reduceat(centred * centred, starts) / others)",
        "np.add.reduceat(centred * centred, starts) / sizes)",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/advantages.py",
        "centred[np.repeat(constant, sizes)] = 0.0",
        "pass",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/iteration.py",
        "recipe.whitened(found.advantages, known.advantages, shift_mean=True)",
        "recipe.whitened(found.advantages, known.advantages, shift_mean=False)",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/iteration.py",
        "recipe.whitened(rewards, known.rewards, shift_mean=False)",
        "recipe.whitened(rewards, known.rewards, shift_mean=True)",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/estimates.py",
        "gamma=gamma, gae_lambda=value_gae_lambda)",
        "gamma=gamma, gae_lambda=gae_lambda)",
        ESTIMATES,
    ),
    Mutation(
        "rlhf_core/algorithms/whitening.py",
        "white if shift_mean else white + whole.mean",
        "white + whole.mean if shift_mean else white",
        WHITENING,
    ),
    Mutation(
        "rlhf_core/algorithms/whitening.py",
        'whole.count - 1 if variance == "bessel"',
        'whole.count - 1 if variance != "bessel"',
        WHITENING,
    ),
    Mutation(
        "rlhf_core/algorithms/moments.py",
        "rows.m2 + rows.counts * away * away",
        "rows.m2",
        ("tests/property/test_ragged_maths.py",),
    ),
    Mutation("rlhf_core/algorithms/moments.py", "d = x[t] - first", "d = x[t]", WHITENING),
    # Importance weights, and what the stage carries.
    Mutation(
        "rlhf_core/algorithms/off_policy.py",
        "np.subtract(logprobs, sampler_logprobs, dtype",
        "np.subtract(sampler_logprobs, logprobs, dtype",
        WEIGHTS,
    ),
    Mutation(
        "rlhf_core/algorithms/off_policy.py",
        "weights = np.minimum(weights, correction_max)",
        "weights = np.clip(weights, correction_min, correction_max)",
        WEIGHTS,
    ),
    Mutation(
        "rlhf_core/algorithms/off_policy.py",
        "sequence_sums(log_ratio, offsets) / np.maximum(tokens, 1)",
        "sequence_sums(log_ratio, offsets)",
        WEIGHTS,
    ),
    Mutation(
        "rlhf_core/artifacts/columns.py",
        "max_splits=1, reverse=True",
        "max_splits=1",
        ADVANTAGES,
    ),
    Mutation(
        "rlhf_core/algorithms/responses.py",
        "first_row=self.first_row + start",
        "first_row=self.first_row",
        ADVANTAGES,
    ),
    Mutation(
        "rlhf_core/algorithms/iteration.py",
        "known = replace(known, kl_coef=state.kl_coef)",
        "pass",
        ADVANTAGES,
    ),
    # The terms of the loss together, against the textbook.
    Mutation(
        PPO_LOSS_FILE, "- settings.entropy_coef * entropy_term", "+ settings.entropy_coef * entropy_term", TEXTBOOK
    ),
    Mutation(PPO_LOSS_FILE, "return settings.value_coef * value_term", "return value_term", TEXTBOOK),
    Mutation(
        PPO_LOSS_FILE,
        "entropy_term = (weights * outputs.entropy).sum()",
        "entropy_term = outputs.entropy.sum() / whole.tokens",
        TEXTBOOK,
    ),
    Mutation(PPO_LOSS_FILE, "kl_term = (weights * kls).sum()", "kl_term = kls.sum() / whole.tokens", TEXTBOOK),
    # The optimiser.
    Mutation("rlhf_core/training/optimizer.py", '"weight_decay": weight_decay}', '"weight_decay": 0.0}', LEARNER),
    Mutation("rlhf_core/training/optimizer.py", "else min(step, total_steps)", "else step", LEARNER),
    Mutation("rlhf_core/training/optimizer.py", '"betas": (betas[0], betas[1])', '"betas": (betas[0], 0.999)', LEARNER),
    # Reward sources.
    Mutation(
        "rlhf_core/reward/rules.py",
        "max(min_tokens - tokens, tokens - max_tokens, 0)",
        "max(min_tokens - tokens, 0)",
        RULES,
    ),
    Mutation("rlhf_core/reward/rules.py", "len(distinct) / total - 1.0", "total / len(distinct) - 1.0", RULES),
    Mutation("rlhf_core/reward/rules.py", "len(response_ids) - ngram + 1", "len(response_ids) - ngram", RULES),
    Mutation(
        "rlhf_core/reward/rules.py", "json.loads(response, parse_constant=_refuse)", "json.loads(response)", RULES
    ),
    Mutation("rlhf_core/reward/answers.py", "float(found[-1].replace", "float(found[0].replace", RULES),
    Mutation("rlhf_core/reward/answers.py", '.replace(",", "")', '.replace(",", ".")', RULES),
    Mutation("rlhf_core/reward/answers.py", "/ max(1.0, abs(right))", "/ max(1.0, abs(found))", RULES),
    Mutation("rlhf_core/reward/answers.py", "        return 1.0\n", "        return partial_credit\n", RULES),
    Mutation("rlhf_core/reward/language.py", " and highest > lowest", "", LANGUAGE),
    Mutation("rlhf_core/reward/language.py", "best == language and", "language in dict(ranked[:9]) and", LANGUAGE),
    Mutation("rlhf_core/reward/rows.py", "len(found) != len(sample_ids):", "len(found) < len(sample_ids):", FUNCTIONS),
    Mutation("rlhf_core/reward/rows.py", "isinstance(value, bool) or ", "", FUNCTIONS),
    Mutation("rlhf_core/reward/rows.py", "        return math.nan\n", "        return 0.0\n", FUNCTIONS),
    Mutation("rlhf_core/reward/scores.py", "        keep &= ~bad\n", "", NONFINITE),
    Mutation("rlhf_core/reward/passes.py", 'self.nonfinite_scores == "drop" or bool(', "bool(True or ", NONFINITE),
    Mutation("rlhf_core/reward/service.py", 'nonfinite == "drop" or math.isfinite(score)', "True", SERVICES),
    Mutation("rlhf_core/reward/user_function.py", "[dict(row) for row in rows]", "rows", FUNCTIONS),
    Mutation("rlhf_core/reward/service.py", "range(1, self.retries + 2)", "range(1, self.retries + 1)", SERVICES),
    Mutation("rlhf_core/reward/service.py", "* 2 ** (tries - 1)", "* 2", SERVICES),
    Mutation("rlhf_core/reward/service.py", "self._hidden(body.decode", "(body.decode", SERVICES),
    Mutation("rlhf_core/reward/service.py", "if time.monotonic() > deadline:", "if False:", SERVICES),
    Mutation(
        "rlhf_core/reward/http_service.py",
        "return checked_scores(scores, sample_ids, nonfinite=nonfinite)",
        "return [float(score) for score in scores]",
        SERVICES,
    ),
    Mutation("rlhf_core/reward/http_service.py", "not in scores]", "not in {}]", SERVICES),
    Mutation("rlhf_core/reward/llm_judge.py", "not min_score <= score <= max_score:", "score > max_score:", SERVICES),
    Mutation("rlhf_core/reward/scores.py", "total += weight * scores", "total += scores", SOURCES),
    Mutation(
        "stages/evaluate.py",
        "run_other_sources(passes, rewards)",
        "run_other_sources(passes, params.rewards)",
        HELD_OUT,
    ),
    Mutation("rlhf_core/report/metrics.py", "policy.scores, seed", "policy.scores[::-1], seed", HELD_OUT),
    # The reward model.
    Mutation(LOSSES_FILE, "z = chosen - rejected - margins", "z = chosen - rejected + margins", LOSSES),
    Mutation(LOSSES_FILE, "(1 - targets) * functional.logsigmoid(-z)", "functional.logsigmoid(-z)", LOSSES),
    Mutation(LOSSES_FILE, "(places[None, :] > places[:, None])", "(places[None, :] >= places[:, None])", LOSSES),
    Mutation(LOSSES_FILE, "torch.square(2 * torch.cat", "torch.square(torch.cat", LOSSES),
    Mutation("rlhf_core/training/ranking.py", "(chosen > rejected)", "(chosen >= rejected)", RANKING),
    Mutation(
        "rlhf_core/training/ranking.py",
        "clustered_interval(wins, prompts,",
        "clustered_interval(wins, [str(n) for n in range(len(wins))],",
        RANKING,
    ),
    Mutation(
        "rlhf_core/training/comparisons.py",
        "and row.ids(first) != row.ids(second)\n    ]\n\n\ndef count",
        "\n    ]\n\n\ndef count",
        RANKING,
    ),
    Mutation(
        "rlhf_core/training/reward_model.py",
        "if loss < self._loss:",
        "if loss > self._loss or not self._kept:",
        KEPT,
    ),
    Mutation(
        "rlhf_core/training/reward_model.py",
        'parameter.detach().to("cpu", copy=True)',
        "parameter.detach()",
        KEPT,
    ),
    Mutation(
        "rlhf_core/training/reward_model.py",
        "0.5 if tie else _target(row, objective)",
        "_target(row, objective)",
        BY_HAND,
    ),
    Mutation("rlhf_core/models/reward_text.py", "split_special_tokens=True", "split_special_tokens=False", REWARD_TEXT),
    Mutation("rlhf_core/models/reward_text.py", "positions - offset - 1", "positions", REWARD_TEXT),
    Mutation(
        "rlhf_core/models/forward.py", "(batch.position_ids >= begins)", "(batch.position_ids < begins)", REWARD_TEXT
    ),
]
