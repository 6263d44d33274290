"""Rows behind each other in one sequence, without pads: only attention sees them as rows.

Everything in a decoder but attention treats each token by itself, so pads there are wasted time. Attention alone gets
the rows padded, and gives them back without pads: the same numbers as padded rows, up to rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "rows"
_rows: ContextVar[tuple[int, int, Tensor] | None] = ContextVar("rows", default=None)
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
    with _as_rows(model, (count, width, real)):
        output = model(
            input_ids=input_ids.flatten()[real][None],
            position_ids=position_ids.flatten()[real][None],
            use_cache=False,
        )
    states = output.last_hidden_state[0]
    return states.new_zeros(count * width, states.shape[-1]).index_copy(0, real, states).unflatten(0, (count, width))


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
def _as_rows(model: PreTrainedModel, rows: tuple[int, int, Tensor]) -> Iterator[None]:
    """Let the model's attention see rows for the length of one pass."""
    config: Any = model.config
    before, token = config._attn_implementation, _rows.set(rows)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _rows.reset(token)


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention within the rows of one sequence: [1, heads, N, D] to [1, N, heads, D]."""
    rows = _rows.get()
    assert rows is not None
    count, width, real = rows

    def padded(x: Tensor) -> Tensor:
        flat = x[0].transpose(0, 1)
        whole = flat.new_zeros(count * width, *flat.shape[1:]).index_copy(0, real, flat)
        return whole.unflatten(0, (count, width)).transpose(1, 2)

    options = {name: options[name] for name in ("scaling", "dropout") if name in options}
    found, _ = sdpa_attention_forward(
        module, padded(query), padded(key), padded(value), None, is_causal=True, **options
    )
    return found.flatten(0, 1).index_select(0, real)[None], None


AttentionInterface.register(_NAME, _attention)
