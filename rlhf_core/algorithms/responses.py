"""All responses of an iteration as ragged arrays: what shaping and estimation start from."""

from dataclasses import dataclass

from rlhf_core.algorithms.ragged import Groups, Offsets, PerRow, PerToken, RowFlags, lengths


@dataclass(frozen=True)
class Responses:
    """B responses with N tokens, those of all shards and of replayed iterations; whitening runs over all of them.

    Attributes:
        offsets: [B + 1], int64.
        own: [B], True for what this iteration sampled, False for what it replays.
        groups: [B], int64; equal numbers answer the same prompt in the same iteration.
        finished: [B], True where the model ended the response by itself.
        scores: [B], reward units.
        sampler_logprobs, logprobs, ref_logprobs: [N], nats: sampler; policy before the update; reference.
        full_kl: [N], nats, KL(policy || reference) over the vocabulary; None without score.full_kl.
        values: [N], reward units, V before each token; None without a critic.
        bootstrap_values: [B], reward units, V after the last token; None without a critic.
    """

    offsets: Offsets
    own: RowFlags
    groups: Groups
    finished: RowFlags
    scores: PerRow
    sampler_logprobs: PerToken
    logprobs: PerToken
    ref_logprobs: PerToken
    full_kl: PerToken | None
    values: PerToken | None
    bootstrap_values: PerRow | None

    @property
    def filled(self) -> RowFlags:
        """[B], True for responses with at least one token: the others take no part in anything."""
        return lengths(self.offsets) > 0
