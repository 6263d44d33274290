"""Rows behind each other in one sequence, without pads and without repetition: only attention sees them as rows.

Everything in a decoder but attention treats each token by itself, so pads there are wasted time, and so is a token that
stands behind the same tokens in another row: the chat template's first turn, or the prompt of several responses. Each
such beginning is computed once. Attention alone gets whole rows, those of similar length padded together, and gives
back each token once: the same numbers as padded rows, up to rounding.
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

from rlhf_core.models.batching import similar_lengths

_NAME = "rows"
# Tokens of a row up to which torch's bfloat16 attention on CPUs is slower backwards than float32 from the beginning:
# 28 against 13 ms for 16 rows of 96 tokens, 25 each for 8 rows of 256.
_SLOW_BACKWARD = 256


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a sequence stand in the rows that attention gets, which hold M places, pads included."""

    groups: list[tuple[int, int]]  # rows and width of each; M is the sum of their products
    tokens: Tensor  # [M], which of the N tokens stands at each place; at a pad the last one of its row
    places: Tensor  # [N], of each token the first of the places where it stands


_packed: ContextVar[tuple[PreTrainedModel, Layout] | None] = ContextVar("packed", default=None)
# What rounding may change of the largest state; another position or a token that is not there changes more.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_packable: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


def packed_states(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
    """Return last hidden states of right-padded rows, computed without the pads and each common beginning once.

    Args:
        model: For which `packable` holds; a causal model without its head.
        input_ids: [B, S] int64.
        mask: [B, S], 1 = real token.
        wanted: [W], flat indices into [B * S] of real tokens.

    Returns:
        [W, H].
    """
    rows = [row[:length] for row, length in zip(input_ids.tolist(), mask.sum(-1).tolist(), strict=True)]
    ids, positions, tokens = without_repetition(rows)
    device, width = input_ids.device, input_ids.shape[1]
    with _as_rows(model, layout(tokens, count=len(ids), device=device)):
        output = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
        )
    at = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)
    return output.last_hidden_state[0].index_select(0, at.flatten()[wanted])


def without_repetition(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the tokens of rows, those of a beginning that several rows have in common once.

    Returns:
        ids [N] and positions [N] of the tokens, in the order in which they first come, and for each row the place of
        each of its tokens among the N.
    """
    ids: list[int] = []
    positions: list[int] = []
    known: dict[tuple[int, int], int] = {}  # (token before, id) -> token
    tokens: list[list[int]] = []
    for row in rows:
        before, own = -1, []
        for position, token_id in enumerate(row):
            token = known.setdefault((before, token_id), len(ids))
            if token == len(ids):
                ids.append(token_id)
                positions.append(position)
            own.append(token)
            before = token
        tokens.append(own)
    return ids, positions, tokens


def layout(tokens: Sequence[Sequence[int]], *, count: int, device: torch.device) -> Layout:
    """Return the rows as attention gets them: groups of similar length, each padded to its longest row.

    Args:
        tokens: From without_repetition.
        count: N.
        device: Of the model.
    """
    groups: list[tuple[int, int]] = []
    flat: list[int] = []
    places = [-1] * count
    for group in similar_lengths([len(row) for row in tokens], device):
        width = len(tokens[group[0]])
        groups.append((len(group), width))
        for row in group:
            for token in tokens[row]:
                if places[token] < 0:
                    places[token] = len(flat)
                flat.append(token)
            # At pads a token of the row itself: what is not finite in one row must not get into another as 0 * NaN.
            flat += [tokens[row][-1]] * (width - len(tokens[row]))
    return Layout(groups, torch.tensor(flat, device=device), torch.tensor(places, device=device))


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
    ids = torch.tensor([[0, 1, 2, 3, 0, 0], [0, 1, 4, 5, 6, 7]], device=device) % model.config.vocab_size
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6], device=device)
    wanted = mask.flatten().nonzero().squeeze(-1)
    positions = torch.arange(6, device=device).expand(2, 6)
    changed = ids.clone()
    changed[0, 2:4] = ids[1, 4:]
    try:
        with torch.autocast(device.type, enabled=False):
            padded = model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            packed, other = (packed_states(model, rows, mask, wanted) for rows in (ids, changed))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        return False
    far = (packed - padded[mask.bool()]).abs().max() / padded.abs().max()
    return bool(far <= _ROUNDING[padded.dtype]) and torch.allclose(packed[4:], other[4:], rtol=1e-6, atol=1e-6)


@contextmanager
def _as_rows(model: PreTrainedModel, rows: Layout) -> Iterator[None]:
    """Let the model's attention see rows for the length of one pass."""
    config: Any = model.config
    before, token = config._attn_implementation, _packed.set((model, rows))
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
    rows = packed[1]
    # A token's state is taken from one of its rows, so its query has a gradient in that row alone.
    spread = [_Spread.apply(flat[0], rows.tokens, rows.places, True)]
    spread += [_Spread.apply(x, rows.tokens, rows.places, False) for x in flat[1:]]
    sizes = [count * width for count, width in rows.groups]
    found = []
    for (count, width), *parts in zip(rows.groups, *(x.split(sizes) for x in spread), strict=True):
        group = [part.unflatten(0, (count, width)).transpose(1, 2) for part in parts]
        found.append(_causal(module, group, options).flatten(0, 1))
    return torch.cat(found).index_select(0, rows.places)[None], None


class _Spread(torch.autograd.Function):
    """[N, heads, D] of the tokens to [M, heads, D] of all places; gradients of one token are added up in float32.

    With `alone` only the places that a token's result is taken from have a gradient, so there is nothing to add up.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, tokens: Tensor, places: Tensor, alone: bool) -> Tensor:
        ctx.save_for_backward(tokens, places)
        ctx.alone = alone
        return flat.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        tokens, places = ctx.saved_tensors
        if ctx.alone:
            return gradient.index_select(0, places), None, None, None
        exact = torch.promote_types(gradient.dtype, torch.float32)
        whole = gradient.new_zeros(len(places), *gradient.shape[1:], dtype=exact)
        return whole.index_add_(0, tokens, gradient.to(exact)).to(gradient.dtype), None, None, None


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
