"""Which rows run together under a token budget; padded batches, and which positions predict response tokens.

Rows are padded on the right, so that under causal attention no real token can see a pad, and which token is real
follows from lengths, never from comparing ids (pad and EOS may share an id).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Pads in a group of rows that attention gets where all else runs without (packing.py), as a share of its real tokens:
# few on a CPU. Elsewhere (not measured) each group costs a call of attention in every layer, so groups are few.
_PADS, _PADS_ELSEWHERE = {"cpu": 0.05}, 0.5
# Places for each token of the budget that a batch of such rows may have as a rectangle, in which its ids are held.
_RECTANGLE = 8


@dataclass(frozen=True)
class Batch:
    """Rows prompt + response, with every response token's place in them."""

    rows: list[int]  # [B] which rows these are, in the caller's numbering
    input_ids: Tensor  # [B, S] int64, right-padded
    attention_mask: Tensor  # [B, S] int64, 1 = real token
    position_ids: Tensor  # [B, S] int64, 0 .. S - 1 in every row
    predictors: Tensor  # [N] int64, flat index into [B * S] of the state before each response token
    targets: Tensor  # [N] int64, the response tokens, row after row
    ends: Tensor  # [B] int64, flat index into [B * S] of the last real token: the state after the response
    lengths: list[int]  # [B] response tokens of each row; they sum to N

    @property
    def critic_places(self) -> Tensor:
        """[N + B], the states that a critic reads: predictors, then ends."""
        return torch.cat([self.predictors, self.ends])


def collate(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    pad_id: int,
    device: torch.device,
) -> Batch:
    """Build one batch from the rows named.

    The state before response token t of a row with P prompt tokens is at position P + t - 1: the logits there predict
    the token, and the value there is the value before it.

    Args:
        prompt_ids: Per row, at least one token each.
        response_ids: Per row; may be empty.
        rows: Indices of the rows to take.
        pad_id: Fills the right; its value has no effect.
        device: Where the tensors go.
    """
    width = max(len(prompt_ids[row]) + len(response_ids[row]) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    predictors: list[int] = []
    targets: list[int] = []
    ends: list[int] = []
    for place, row in enumerate(rows):
        prompt, response = prompt_ids[row], response_ids[row]
        total = len(prompt) + len(response)
        input_ids[place, :total] = torch.tensor([*prompt, *response])
        attention_mask[place, :total] = 1
        first = place * width + len(prompt) - 1
        predictors.extend(range(first, first + len(response)))
        targets.extend(response)
        ends.append(place * width + total - 1)
    return Batch(
        rows=list(rows),
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        position_ids=torch.arange(width, device=device).expand(len(rows), width),
        predictors=torch.tensor(predictors, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        ends=torch.tensor(ends, dtype=torch.int64, device=device),
        lengths=[len(response_ids[row]) for row in rows],
    )


def token_budget_batches(lengths: Sequence[int], *, max_batch_tokens: int) -> list[list[int]]:
    """Group rows of similar length so that rows x longest row stays within the budget.

    Args:
        lengths: [B] tokens of each row, prompt included.
        max_batch_tokens: Tokens of one padded batch. A single longer row is a batch of its own.

    Returns:
        Batches of row indices, longest first (so that memory peaks at the start, not after hours); every row once.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches: list[list[int]] = []
    for row in order:
        # Longest first: the first row of a batch sets its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def batches_by_prompt(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, max_batch_tokens: int, device: torch.device
) -> list[list[int]]:
    """Group rows of the same prompt, for a model that runs without pads and computes a common beginning once.

    Args:
        prompts: [B] prompt ids of each row.
        lengths: [B] tokens of each row, prompt included.
        max_batch_tokens: Tokens of one batch with the pads that attention may add to them. A single longer row is a
            batch of its own, and a long one takes no more short ones with it than fit into a few times the budget.
        device: Of the model.

    Returns:
        Batches of row indices, those of the prompt with the longest row first; every row once.
    """
    families = [tuple(prompt) for prompt in prompts]
    longest: dict[tuple[int, ...], int] = {}
    for family, length in zip(families, lengths, strict=True):
        longest[family] = max(length, longest.get(family, 0))
    order = sorted(range(len(lengths)), key=lambda row: (-longest[families[row]], families[row], -lengths[row], row))
    pads = _PADS.get(device.type, _PADS_ELSEWHERE)
    batches: list[list[int]] = [[]]
    total = widest = 0
    for row in order:
        total, widest = total + lengths[row], max(widest, lengths[row])
        rectangle = (len(batches[-1]) + 1) * widest
        size = max(min((1 + pads) * total, rectangle), rectangle / _RECTANGLE)
        if size > max_batch_tokens and batches[-1]:
            batches.append([])
            total = widest = lengths[row]
        batches[-1].append(row)
    return [batch for batch in batches if batch]


def similar_lengths(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return groups of rows, longest first, each with as many rows as the pads allow; rows without tokens in none.

    Args:
        lengths: [B] tokens of each row.
        device: Of the model.
    """
    pads = _PADS.get(device.type, _PADS_ELSEWHERE)
    groups: list[list[int]] = []
    total = 0
    for row in sorted((row for row in range(len(lengths)) if lengths[row]), key=lambda row: -lengths[row]):
        total += lengths[row]
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= (1 + pads) * total:
            groups[-1].append(row)
        else:
            groups.append([row])
            total = lengths[row]
    return groups
