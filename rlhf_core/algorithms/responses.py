"""Responses of an iteration as ragged arrays: what shaping and estimation start from."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlhf_core.algorithms.ragged import Groups, Offsets, PerRow, PerToken, RowFlags, lengths


@dataclass(frozen=True)
class Responses:
    """B responses with N tokens: consecutive ones of an iteration, its own and those that it replays.

    Attributes:
        first_row: Place of the first one among all responses of the iteration.
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

    first_row: int
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

    def blocks(self, tokens: int) -> Iterator["Responses"]:
        """Yield consecutive parts, each of about so many tokens: arrays that fit into a core's cache, and views of it.

        Args:
            tokens: A block ends with the row that reaches them. Without rows there is one block, without rows.
        """
        start, rows = 0, self.offsets.size - 1
        if rows == 0:
            yield self
        while start < rows:
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + tokens))
            stop = min(max(stop, start + 1), rows)
            yield self._rows(start, stop)
            start = stop

    def _rows(self, start: int, stop: int) -> "Responses":
        """Rows start to stop."""
        first, last = self.offsets[start], self.offsets[stop]
        tokens = lambda values: None if values is None else values[first:last]
        return Responses(
            first_row=self.first_row + start,
            offsets=self.offsets[start : stop + 1] - first,
            own=self.own[start:stop],
            groups=self.groups[start:stop],
            finished=self.finished[start:stop],
            scores=self.scores[start:stop],
            sampler_logprobs=self.sampler_logprobs[first:last],
            logprobs=self.logprobs[first:last],
            ref_logprobs=self.ref_logprobs[first:last],
            full_kl=tokens(self.full_kl),
            values=tokens(self.values),
            bootstrap_values=None if self.bootstrap_values is None else self.bootstrap_values[start:stop],
        )
