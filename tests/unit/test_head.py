"""Fused logprobs and entropy of the output embedding: numbers and gradients against the plain way.

Mutations that must fail here: the temperature forgotten in the backward pass; entropy's gradient without its own term;
chunks that overwrite each other; the kept chunk used twice; bfloat16 logits under autocast; a block that gets another
block's numbers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.models.head import head_statistics

HIDDEN, VOCABULARY = 5, 11


def case(tokens: int, *, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    added = torch.randn(VOCABULARY, generator=generator, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, added, torch.randint(VOCABULARY, (tokens,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_gradients_are_those_of_finite_differences(bias: bool, chunk: int) -> None:
    hidden, weight, added, targets = case(4, bias=bias)
    of = lambda *tensors: head_statistics(
        *tensors, *([] if bias else [None]), targets, temperature=0.7, logits_chunk_tokens=chunk
    )
    torch.autograd.gradcheck(of, (hidden, weight, added) if bias else (hidden, weight))


@pytest.mark.parametrize("block", [1, 2 * VOCABULARY, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_numbers_and_gradients_are_those_of_the_plain_way(
    chunk: int, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.models.head._BLOCK", block)
    hidden, weight, added, targets = case(7, bias=True, dtype=dtype)
    upstream = torch.linspace(-1, 1, 7, dtype=dtype)
    found = head_statistics(hidden, weight, added, targets, temperature=0.7, logits_chunk_tokens=chunk)
    expected = plain(hidden, weight, added, targets, 0.7)
    inputs = (hidden, weight, added)
    gradients = [
        torch.autograd.grad((pair[0] * upstream + pair[1] * upstream.flip(0)).sum(), inputs)
        for pair in (found, expected)
    ]
    for one, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("enabled", [False, True])
def test_blocks_change_no_bit(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for block in (3 * VOCABULARY, 1000):
        monkeypatch.setattr("rlhf_core.models.head._BLOCK", block)
        inputs = case(7, bias=True, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            numbers = head_statistics(*inputs, temperature=0.7, logits_chunk_tokens=5)
        found.append((*numbers, *torch.autograd.grad((numbers[0] + 2 * numbers[1]).sum(), inputs[:3])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_autocast_changes_no_logprob_and_rounds_gradients_to_its_dtype() -> None:
    hidden, weight, _, targets = case(7, bias=False, dtype=torch.float32)
    numbers, gradients = [], []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logprobs, entropy = head_statistics(hidden, weight, None, targets, temperature=1.0, logits_chunk_tokens=3)
        numbers.append([logprobs, entropy])
        gradients.append(torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight)))
    assert all(torch.equal(one, other) for one, other in zip(*numbers, strict=True))
    for exact, rounded in zip(*gradients, strict=True):
        # Three roundings to 8 bits: of both factors and the product; sums of terms of both signs lose some more.
        assert 0 < (exact - rounded).norm() / exact.norm() < 3 * 2**-8


def test_a_second_backward_pass_finds_the_same_gradients() -> None:
    hidden, weight, added, targets = case(7, bias=True)
    logprobs, entropy = head_statistics(hidden, weight, added, targets, temperature=0.7, logits_chunk_tokens=3)
    loss = (logprobs + 2 * entropy).sum()
    first, second = (torch.autograd.grad(loss, (hidden, weight, added), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_states_in_bfloat16_get_gradients_in_bfloat16() -> None:
    hidden, weight, _, targets = case(3, bias=False, dtype=torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = head_statistics(low, weight, None, targets, temperature=1.0, logits_chunk_tokens=2)
    d_low, d_weight = torch.autograd.grad(logprobs.sum(), (low, weight))
    assert logprobs.dtype == d_weight.dtype == torch.float32 and d_low.dtype == torch.bfloat16
    wanted = torch.autograd.grad(
        plain(low.detach().float().requires_grad_(), weight, None, targets, 1.0)[0].sum(), weight
    )
    torch.testing.assert_close(d_weight, wanted[0], rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_no_tokens_are_fine() -> None:
    hidden, weight, _, targets = case(3, bias=False)
    frozen = weight.detach()
    logprobs, _ = head_statistics(hidden, frozen, None, targets, temperature=1.0, logits_chunk_tokens=2)
    logprobs.sum().backward()
    assert hidden.grad is not None and frozen.grad is None
    empty = head_statistics(hidden[:0], frozen, None, targets[:0], temperature=1.0, logits_chunk_tokens=2)
    assert [x.shape for x in empty] == [(0,), (0,)]
