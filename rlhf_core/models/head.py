"""The output embedding with what is made of its logits, fused: logprobs and entropy of tokens, and their gradients.

The logits of a whole batch never exist, neither in the forward nor in the backward pass: a chunk of rows is made, used
and overwritten by the next one. The backward pass begins with the chunk that is still there, and makes the others
again. On a CPU, softmax and its gradient go through a chunk block by block.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Of a chunk's numbers, how many go through softmax and its gradient at once on a CPU: with a temporary of as many they
# stay in a core's cache. Half of the time of whole chunks, and the same bits (docs/performance.md).
_BLOCK = 2**19

# Stands for a logit of -inf, with which a head's bias may forbid a token: 0 * -1e30 is 0 in entropy and gradients,
# where 0 * -inf would be no number.
_FORBIDDEN = -1e30


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the logits [n, V] over the temperature, float32, of one chunk of states [n, H].

    The product is in float32 even under autocast: logits near 20 rounded to bfloat16 are off by up to 0.06 nats, and
    differently so for each batch composition, which halves the use of a ratio. Measured cost: 6 to 10 % of a pass.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    logits_chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target, and the entropy of the distribution that it is from.

        z = (W h + b) / temperature,  p = softmax(z)
        logprob = log p[target],  entropy = -sum_v p_v log p_v

    with the gradients, which the backward pass computes from z made a second time:

        d logprob / d z = onehot(target) - p
        d entropy / d z = -p (log p + entropy)

    Under autocast the products of the backward pass are in its dtype, as those of all other layers are there.

    Args:
        hidden: [N, H], states before the tokens.
        weight: [V, H], W.
        bias: [V], b; None = 0. -inf forbids a token.
        targets: [N] int64.
        temperature: Positive.
        logits_chunk_tokens: Rows of z that exist at once.

    Returns:
        [N] and [N], float32 (float64 for such weights), nats. Gradients flow to hidden, weight and bias.
    """
    found: tuple[Tensor, Tensor] = _HeadStatistics.apply(
        hidden, weight, bias, targets, temperature, logits_chunk_tokens
    )
    return found


class _HeadStatistics(torch.autograd.Function):
    """head_statistics, chunk by chunk in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        logits_chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        logprobs, entropy, normaliser = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        z = None
        for part in _chunks(len(targets), logits_chunk_tokens):
            z = None  # its memory is the next one's
            z = chunk_logits(hidden[part], weight, bias, temperature)
            chosen = z.gather(-1, targets[part, None]).squeeze(-1)
            if bias is not None:
                z.clamp_(min=_FORBIDDEN)
            for rows in blocks(z):
                highest = z[rows].amax(-1, keepdim=True)
                p = torch.sub(z[rows], highest).exp_()
                total = p.sum(-1)
                normaliser[part][rows] = highest.squeeze(-1) + total.log()
                # -sum p log p = normaliser - sum p z, without a tensor of log-probabilities.
                entropy[part][rows] = normaliser[part][rows] - p.mul_(z[rows]).sum(-1) / total
            logprobs[part] = chosen - normaliser[part]
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature, ctx.logits_chunk_tokens, ctx.last = temperature, logits_chunk_tokens, z
        device = hidden.device.type
        ctx.products = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_logprobs: Tensor, for_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight) if wanted[1] else None
        d_bias = torch.zeros_like(bias) if wanted[2] else None
        factor = weight.to(ctx.products)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in reversed(_chunks(len(targets), ctx.logits_chunk_tokens)):
                z, ctx.last = ctx.last, None
                if z is None:
                    z = chunk_logits(hidden[part], weight, bias, ctx.temperature)
                    if bias is not None:
                        z.clamp_(min=_FORBIDDEN)
                # d/dz of the sum over rows of logprob g + entropy e is onehot g - p (g + e (log p + entropy)); and z is
                # the states' product over the temperature.
                g, e = (one[part, None] / ctx.temperature for one in (for_logprobs, for_entropy))
                onehot, log_normaliser, rest = targets[part, None], normaliser[part, None], g + e * entropy[part, None]
                dz = z if z.dtype == ctx.products else torch.empty_like(z, dtype=ctx.products)
                for rows in blocks(z):
                    block = z[rows].sub_(log_normaliser[rows])  # log p
                    p = block.exp()
                    block.mul_(-e[rows]).sub_(rest[rows]).mul_(p)
                    block.scatter_add_(-1, onehot[rows], g[rows].to(block.dtype))
                    if dz is not z:
                        dz[rows] = block
                if d_bias is not None:
                    d_bias += z.sum(0)
                if d_hidden is not None:
                    d_hidden[part] = dz @ factor
                if d_weight is not None and dz.dtype == d_weight.dtype:
                    d_weight.addmm_(dz.T, hidden[part].to(dz.dtype))
                elif d_weight is not None:
                    d_weight += dz.T @ hidden[part].to(dz.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def blocks(logits: Tensor) -> list[slice]:
    """Return the rows of a chunk [n, V] that are worked on at once: all, or on a CPU what its caches hold."""
    rows = _BLOCK // logits.shape[-1] if logits.device.type == "cpu" else len(logits)
    return _chunks(len(logits), max(rows, 1))


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
