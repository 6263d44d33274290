"""Rows behind each other in one sequence, without pads: only attention sees them as rows.

Everything in a decoder but attention treats each token by itself, so pads there are wasted time. Attention alone gets
the rows, those of similar length padded together, and gives them back without pads: the same numbers as padded rows, up
to rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "rows"
# Pads in a group of rows, as a share of its real tokens. A call of attention costs a GPU more than pads do.
_PADS = {"cpu": 0.05}
# Tokens of a row up to which torch's bfloat16 attention on CPUs is slower backwards than float32 from the beginning:
# 28 against 13 ms for 16 rows of 96 tokens, 25 each for 8 rows of 256.
_SLOW_BACKWARD = 256


@dataclass(frozen=True)
class Group:
    """Rows next to each other that attention gets padded to one width."""

    tokens: slice  # of the sequence
    count: int
    width: int
    places: Tensor | None  # [N] of each token in [count * width]; None without pads


_packed: ContextVar[tuple[PreTrainedModel, Sequence[Group]] | None] = ContextVar("packed", default=None)
# What rounding may change of the largest state; another position or a token that is not there changes more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_packable: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


def packed_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last hidden states [B, S, H] of right-padded rows, computed without the pads, whose states are 0.

    Args:
        model: For which `packable` holds; a causal model without its head.
        input_ids: [B, S] int64.
        position_ids: [B, S] int64.
        mask: [B, S], 1 = real token.
    """
    count, width = input_ids.shape
    real = mask.flatten().nonzero().squeeze(-1)
    with _as_rows(model, grouped(mask.sum(-1).tolist(), mask.device)):
        output = model(
            input_ids=input_ids.flatten()[real][None],
            position_ids=position_ids.flatten()[real][None],
            use_cache=False,
        )
    states = output.last_hidden_state[0]
    return states.new_zeros(count * width, states.shape[-1]).index_copy(0, real, states).unflatten(0, (count, width))


def grouped(lengths: Sequence[int], device: torch.device) -> list[Group]:
    """Return groups of rows next to each other, each with as many rows as the pads allow; rows without tokens in none.

    Rows in order of their lengths, as token_budget_batches gives them, make the fewest groups.
    """
    pads = _PADS.get(device.type)
    groups: list[list[int]] = []
    for length in filter(None, lengths):
        last = [*groups[-1], length] if groups else []
        if last and (pads is None or len(last) * max(last) <= (1 + pads) * sum(last)):
            groups[-1] = last
        else:
            groups.append([length])
    found, start = [], 0
    for group in groups:
        width, end = max(group), start + sum(group)
        tokens = [row * width + place for row, length in enumerate(group) for place in range(length)]
        places = torch.tensor(tokens, device=device) if len(tokens) < len(group) * width else None
        found.append(Group(slice(start, end), len(group), width, places))
        start = end
    return found


def packable(model: Any) -> bool:
    """Whether a model gives the same states for packed rows; found out once for each model, by running it.

    Not: models with sliding windows, with layers that are not attention, or with an attention of their own.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return False
    if model not in _packable:
        windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        _packable[model] = not windows and kinds == {"full_attention"} and _keeps_rows_apart(model)
    return _packable[model]


@torch.no_grad()
def _keeps_rows_apart(model: PreTrainedModel) -> bool:
    """Whether packed rows of a probe get the states of padded ones, and none depends on another row."""
    device = next(model.parameters()).device
    ids = torch.arange(12, device=device).reshape(2, 6) % model.config.vocab_size
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6], device=device)
    positions = torch.arange(6, device=device).expand(2, 6)
    changed = ids.clone()
    changed[0, :4] = ids[1, :4]
    try:
        with torch.autocast(device.type, enabled=False):
            padded = model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            packed, other = (packed_states(model, rows, positions, mask) for rows in (ids, changed))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return False
    far = (packed - padded)[mask.bool()].abs().max() / padded.abs().max()
    return bool(far <= _ROUNDING[padded.dtype]) and torch.allclose(packed[1], other[1], rtol=1e-6, atol=1e-6)


@contextmanager
def _as_rows(model: PreTrainedModel, groups: Sequence[Group]) -> Iterator[None]:
    """Let the model's attention see rows for the length of one pass."""
    config: Any = model.config
    before, token = config._attn_implementation, _packed.set((model, groups))
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _packed.reset(token)


def same_rows_again() -> AbstractContextManager[None]:
    """Return the context of a layer's second pass, for gradient checkpointing: the rows of the pass that runs now.

    It comes in the backward pass, when packed_states has long returned.
    """
    packed = _packed.get()
    return nullcontext() if packed is None else _as_rows(*packed)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention within the rows of one sequence: [1, heads, N, D] to [1, N, heads, D]."""
    options = {name: options[name] for name in ("scaling", "dropout") if name in options}
    packed = _packed.get()
    assert packed is not None
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    device = query.device.type
    if torch.is_autocast_enabled(device):  # what it would do to each of them inside
        flat = [x.to(torch.get_autocast_dtype(device)) for x in flat]
    found = []
    for group in packed[1]:
        rows = [_padded(x[group.tokens], group) for x in flat]
        states = _causal(module, rows, options).flatten(0, 1)
        found.append(states if group.places is None else states.index_select(0, group.places))
    return torch.cat(found)[None], None


def _padded(flat: Tensor, group: Group) -> Tensor:
    """[N, heads, D] of a group's tokens to [B, heads, S, D]."""
    if group.places is not None:
        whole = flat.new_zeros(group.count * group.width, *flat.shape[1:])
        flat = whole.index_put((group.places,), flat)  # which keeps nothing of it, unlike index_copy
    return flat.unflatten(0, (group.count, group.width)).transpose(1, 2)


def _causal(module: torch.nn.Module, rows: Sequence[Tensor], options: dict[str, Any]) -> Tensor:
    """Causal attention over query, key and value [B, heads, S, D]: [B, S, heads, D]."""
    query = rows[0]
    short = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[-2] <= _SLOW_BACKWARD
    if short and torch.is_grad_enabled() and not options.get("dropout"):
        found: Tensor = _Float32Backward.apply(module, options, *rows)
        return found
    return _sdpa(module, rows, options)


def _sdpa(module: torch.nn.Module, rows: Sequence[Tensor], options: dict[str, Any]) -> Tensor:
    query, key, value = rows
    return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **options)[0]


class _Float32Backward(torch.autograd.Function):
    """Causal attention with the same forward pass, whose backward pass is made again in float32."""

    @staticmethod
    def forward(ctx: Any, module: torch.nn.Module, options: dict[str, Any], *rows: Tensor) -> Tensor:
        ctx.save_for_backward(*rows)
        ctx.module, ctx.options = module, options
        return _sdpa(module, rows, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            rows = [row.detach().float().requires_grad_() for row in saved]
            found = _sdpa(ctx.module, rows, ctx.options)
        gradients = torch.autograd.grad(found, rows, gradient.float())
        return None, None, *(one.to(row.dtype) for one, row in zip(gradients, saved, strict=True))


AttentionInterface.register(_NAME, _attention)
