"""Forward passes: logprobs, entropy and values of response tokens, and scores of whole responses.

Logits exist only for positions that predict a response token, and only `logits_chunk_tokens` of them at once (head.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.batching import Batch, batches_by_prompt, collate, token_budget_batches
from rlhf_core.models.critic import Critic
from rlhf_core.models.head import blocks, chunk_logits, head_statistics
from rlhf_core.models.memory import TokenBudget, in_batches
from rlhf_core.models.packing import packable, packed_states


@dataclass(frozen=True)
class TokenOutputs:
    """Per response token, flat over the batch's rows."""

    logprobs: Tensor  # [N] float32, nats
    entropy: Tensor  # [N] float32, nats, of the full distribution at the state before the token
    values: Tensor | None  # [N] float32, reward units, V before each token; None without a critic
    bootstrap_values: Tensor | None  # [B] float32, V after the last token; None without a critic


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which forward passes run: bfloat16 products for "bf16-autocast", else nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-autocast")


def token_outputs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    temperature: float,
    logits_chunk_tokens: int,
    precision: str,
    critic: Critic | None,
) -> TokenOutputs:
    """Return logprobs, entropy and values of the batch's response tokens.

        logprob_t = log_softmax(logits_t / temperature)[token_t]
        entropy_t = -sum_v p_t(v) log p_t(v),  p_t = softmax(logits_t / temperature)
        value_t   = V(state before token t), bootstrap_value = V(state after the last token)

    Args:
        model: A causal language model whose logits are its output embedding of the last hidden state.
        batch: From collate.
        temperature: The sampling temperature; positive.
        logits_chunk_tokens: Rows of full-vocabulary logits that exist at once.
        precision: compute.precision.
        critic: Reads the policy's hidden states, or runs its own backbone; None = no values.

    Returns:
        Float32 tensors [N]; they carry gradients where gradients are enabled.
    """
    head = model.get_output_embeddings()
    shared = critic is not None and critic.backbone is None
    with autocast(batch.input_ids.device, precision):
        states = _states(model, batch, batch.critic_places if shared else batch.predictors)
        hidden = states[: len(batch.predictors)]
        logprobs, entropy = head_statistics(
            hidden,
            head.weight,
            head.bias,
            batch.targets,
            temperature=temperature,
            logits_chunk_tokens=logits_chunk_tokens,
        )
    if critic is None:
        return TokenOutputs(logprobs, entropy, None, None)
    values, bootstrap_values = critic_values(critic, batch, states, precision=precision)
    return TokenOutputs(logprobs, entropy, values, bootstrap_values)


def critic_values(
    critic: Critic, batch: Batch, policy_states: Tensor | None, *, precision: str
) -> tuple[Tensor, Tensor]:
    """Return V before every response token, [N], and V after every response, [B]; float32, reward units.

    Args:
        critic: Shared or separate.
        batch: From collate.
        policy_states: [N + B, H], the policy's last hidden states at batch.critic_places; needed by a shared critic
            only.
        precision: compute.precision.
    """
    states = policy_states
    if critic.backbone is not None:
        with autocast(batch.input_ids.device, precision):
            states = _states(critic.backbone, batch, batch.critic_places)
    assert states is not None
    values = critic.values(states)
    return values[: len(batch.predictors)], values[len(batch.predictors) :]


def values_alone(model: PreTrainedModel, critic: Critic, batch: Batch, *, precision: str) -> tuple[Tensor, Tensor]:
    """Return what critic_values does, of a shared critic on the policy's states, without any logits.

    Args:
        model: The policy.
        critic: Shared or separate.
        batch: From collate.
        precision: compute.precision.
    """
    if critic.backbone is not None:
        return critic_values(critic, batch, None, precision=precision)
    with autocast(batch.input_ids.device, precision):
        states = _states(model, batch, batch.critic_places)
    return critic_values(critic, batch, states, precision=precision)


def _states(model: PreTrainedModel, batch: Batch, places: Tensor) -> Tensor:
    """Last hidden states [W, H] at flat indices [W] of real tokens.

    Without pads where the model allows it (packing.py). Otherwise rows are padded on the right, so causal attention
    already keeps real tokens from pads, and without an attention mask the kernel takes its faster causal path (1.1 to
    1.25 times on CPU, same bits).
    """
    base: Any = model.base_model
    if len(batch.rows) > 1 and packable(base):
        return packed_states(base, batch.input_ids, batch.attention_mask, places)
    output = base(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    states: Tensor = output.last_hidden_state.flatten(0, 1).index_select(0, places)
    return states


@torch.inference_mode()
def states_of_probe(base: Any, precision: str) -> Tensor | None:
    """Return the last hidden states of some tokens, to find out whether a change to a model changes any bit of them.

    Args:
        base: A model without its head.
        precision: compute.precision.

    Returns:
        [1, 8, H]; None where the model takes more than tokens.
    """
    device = next(base.parameters()).device
    ids = torch.arange(8, device=device)[None] % base.config.vocab_size
    try:
        with autocast(device, precision):
            states: Tensor = base(input_ids=ids).last_hidden_state
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return None
    return states


def full_kl(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    batch: Batch,
    *,
    temperature: float,
    logits_chunk_tokens: int,
    precision: str,
) -> Tensor:
    """Return the KL divergence of the whole next-token distribution, at the state before each response token.

        KL_t = sum_v p_t(v) (log p_t(v) - log q_t(v)),  p, q = softmax(logits / temperature) of policy and reference

    Args:
        policy: p.
        reference: q; of the same vocabulary.
        batch: From collate.
        temperature: The sampling temperature; positive.
        logits_chunk_tokens: Rows of full-vocabulary logits that exist at once, of both models together.
        precision: compute.precision.

    Returns:
        [N] float32, nats, never negative.
    """
    heads = [model.get_output_embeddings() for model in (policy, reference)]
    with autocast(batch.input_ids.device, precision):
        hidden = [_states(model, batch, batch.predictors) for model in (policy, reference)]
    pieces = [hidden[0].new_zeros(0, dtype=torch.float32)]
    rows = max(1, logits_chunk_tokens // 2)
    for start in range(0, len(batch.targets), rows):
        part = slice(start, start + rows)
        of_p, of_q = (
            chunk_logits(states[part], head.weight, head.bias, temperature)
            for states, head in zip(hidden, heads, strict=True)
        )
        pieces += (_kl_of_rows(of_p[some].log_softmax(-1), of_q[some].log_softmax(-1)) for some in blocks(of_p))
    return torch.cat(pieces)


def _kl_of_rows(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [n] of log-probabilities [n, V], summed as sum_v p (exp(-d) - 1 + d) with d = log p - log q.

    That is the same number, because p and q both sum to 1, but no term is negative: in the plain sum, terms of both
    signs leave little but rounding of a divergence as small as a fresh policy's. Below d = -1, p exp(-d) is taken as q,
    which cannot overflow. Where p is 0, the term is q.
    """
    d = log_p - log_q
    p = log_p.exp()
    near = p * (torch.expm1(-d.clamp(min=-1.0)) + d)
    terms = torch.where(d < -1.0, log_q.exp() - p + p * d, near)
    terms = torch.where(p == 0, log_q.exp(), terms)
    return terms.clamp_(min=0.0).sum(-1)


def sequence_scores(model: PreTrainedModel, batch: Batch, *, precision: str) -> Tensor:
    """Return the reward model's score of each row.

    Decoders (a `score` layer over hidden states) are read at the last real token by its position, not by searching for
    the first pad id, which would stop early where pad and EOS share an id. Encoders pool by themselves; those that tell
    two texts apart get the response as the second one.

    Args:
        model: A sequence classifier with one label.
        batch: From collate; prompt and response of each row.
        precision: compute.precision.

    Returns:
        [B] float32, reward units.
    """
    device = batch.input_ids.device
    with autocast(device, precision):
        if not hasattr(model, "score"):
            types = {"token_type_ids": _token_types(batch)} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
            output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **types)
            return output.logits.float().squeeze(-1)
        hidden = _states(model, batch, batch.ends)
    head: Any = model.score
    scores: Tensor = head(hidden.to(head.weight.dtype)).float().squeeze(-1)
    return scores


def _token_types(batch: Batch) -> Tensor:
    """0 for the prompt and pads, 1 for the response; [B, S]."""
    totals = batch.attention_mask.sum(-1, keepdim=True)
    begins = totals - torch.tensor(batch.lengths, device=totals.device)[:, None]
    return ((batch.position_ids >= begins) & (batch.position_ids < totals)).long()


def without_pads(*models: PreTrainedModel) -> bool:
    """Whether models run over rows without pads, each common beginning computed once (packing.py).

    Args:
        models: Causal language models, sequence classifiers, or backbones of critics. Classifiers that pool by
            themselves run with pads (sequence_scores).
    """
    return all(packable(model.base_model) and not _pools(model) for model in models)


def _pools(model: PreTrainedModel) -> bool:
    """Whether a model is a sequence classifier that makes its score of all states by itself."""
    is_classifier = model.base_model is not model and model.get_output_embeddings() is None
    return is_classifier and not hasattr(model, "score")


def cut_rows(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    max_batch_tokens: int,
    packed: bool,
    device: torch.device,
) -> list[list[int]]:
    """Return which rows run through a model together.

    Args:
        prompt_ids, response_ids: Of all rows.
        rows: Indices of those to cut into batches.
        max_batch_tokens: compute.max_batch_tokens, or less.
        packed: without_pads; then responses to one prompt stay together.
        device: Of the model.
    """
    lengths = [len(prompt_ids[row]) + len(response_ids[row]) for row in rows]
    if packed:
        prompts = [prompt_ids[row] for row in rows]
        batches = batches_by_prompt(prompts, lengths, max_batch_tokens=max_batch_tokens, device=device)
    else:
        batches = token_budget_batches(lengths, max_batch_tokens=max_batch_tokens)
    return [[rows[place] for place in batch] for batch in batches]


def for_all_rows(
    compute: Callable[[Batch], Sequence[Tensor]],
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    packed: bool,
    budget: TokenBudget,
    pad_id: int,
    device: torch.device,
    progress: Callable[[int], None],
) -> list[Tensor]:
    """Run a forward pass over all rows in token-budget batches, without gradients.

    Args:
        compute: Maps a batch to one tensor per row of it (for instance the row's logprobs [T]).
        prompt_ids: Per row.
        response_ids: Per row.
        packed: without_pads of the models.
        budget: Tokens of one batch, pads included; lowered where memory runs out.
        pad_id: For padding.
        device: Where the model is.
        progress: Told the number of rows done after each batch.

    Returns:
        In the caller's row order, what `compute` gave for each row, on the CPU.
    """
    results: list[Any] = [None] * len(prompt_ids)
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids, strict=True)]

    def work(rows: list[int]) -> None:
        batch = collate(prompt_ids, response_ids, rows, pad_id=pad_id, device=device)
        for row, result in zip(rows, compute(batch), strict=True):
            results[row] = result.cpu()
        progress(len(rows))

    def cut(rows: list[int], tokens: int) -> list[list[int]]:
        return cut_rows(prompt_ids, response_ids, rows, max_batch_tokens=tokens, packed=packed, device=device)

    with torch.inference_mode():
        in_batches(lengths, budget, work, cut)
    return results
