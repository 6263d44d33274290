"""Weights of a minibatch's tokens. Numbers: hand sums.

Mutations that must fail here: counts of the part for those of the whole; a token mean for a sequence mean; the row's
length for the constant.
"""

import pytest
import torch

from rlhf_core.algorithms.aggregation import token_weights
from rlhf_core.errors import NumericError

PER_TOKEN = [[1.0], [3.0, 5.0, 4.0]]  # losses of two responses, of one and three tokens
# token_mean: 13 / 4. sequence_mean: (1 + 4) / 2, which is not the token mean. constant 8: (1 / 8 + 12 / 8) / 2.
EXPECTED = {"token_mean": 3.25, "sequence_mean": 2.5, "constant": 0.8125}


def part_loss(rows: list[int], aggregation: str) -> float:
    lengths = [len(PER_TOKEN[row]) for row in rows]
    weights = token_weights(lengths, aggregation=aggregation, tokens=4, responses=2, constant=8.0)  # type: ignore[arg-type]
    return float((weights * torch.tensor([loss for row in rows for loss in PER_TOKEN[row]])).sum())


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
@pytest.mark.parametrize("aggregation", EXPECTED)
def test_the_parts_of_a_minibatch_add_up_to_the_whole(aggregation: str, split: list[list[int]]) -> None:
    total = sum(part_loss(rows, aggregation) for rows in split)
    assert total == pytest.approx(EXPECTED[aggregation], rel=1e-12)


def test_a_part_without_rows_has_no_weights() -> None:
    weights = token_weights([], aggregation="sequence_mean", tokens=4, responses=2, constant=8.0)
    assert weights.shape == (0,) and weights.dtype == torch.float64


def test_a_minibatch_without_tokens_is_refused() -> None:
    with pytest.raises(NumericError, match="found 0 tokens in 2 responses"):
        token_weights([], aggregation="token_mean", tokens=0, responses=2, constant=8.0)
