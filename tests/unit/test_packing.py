"""Rows without pads and repetition: the states and gradients of padded rows, and of each row alone.

Mutations that must fail here: attention over the whole sequence; positions that run on; models with windows packed;
equal tokens at other places taken for a common beginning; gradients of a shared token from one of its rows alone.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model, LlamaForCausalLM, MistralConfig, MistralModel, PreTrainedModel

from rlhf_core.models import packing
from rlhf_core.models.batching import Batch, collate, similar_lengths
from rlhf_core.models.packing import packable, packed_states, without_repetition
from tests.tiny import tiny_model

CPU = torch.device("cpu")
# One beginning for the first four rows; one prompt for two; the last row is the beginning of another; token 2 stands at
# other places, too.
PROMPTS = [[1, 70], [1, 71, 72, 73], [5], [1, 71, 72, 73], [1, 71, 72]]
RESPONSES = [[80, 81, 2], [82, 83, 84, 85, 86, 4], [87, 88, 80, 81, 2], [82, 80, 81, 2], [73]]


def rows() -> Batch:
    return collate(PROMPTS, RESPONSES, range(5), pad_id=0, device=CPU)


def states(model: Any, batch: Batch) -> list[Tensor]:
    """Of each row, [tokens, H]."""
    wanted = batch.attention_mask.flatten().nonzero().squeeze(-1)
    found = packed_states(model, batch.input_ids, batch.attention_mask, wanted)
    return list(found.split(batch.attention_mask.sum(-1).tolist()))


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2))
    return model.eval()


@pytest.mark.parametrize("make", [lambda: tiny_model().eval().model, gpt2])
def test_every_row_has_the_states_and_gradients_that_it_has_alone(make: Any) -> None:
    model, batch = make().double(), rows()
    assert packable(model)
    found = states(model, batch)
    weights = torch.arange(found[0].shape[-1], dtype=torch.float64)
    gradients = []
    for one in (True, False):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for place, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ids = [*prompt, *response]
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(found[place], alone, rtol=1e-6, atol=1e-6)
            loss = loss + ((found[place] if one else alone) * weights * (place + 1)).sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    # Llama's norms are float32 within, so a shared token's gradient is rounded once instead of once for each row.
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[1].norm()


def test_the_model_is_left_as_it_was() -> None:
    model: LlamaForCausalLM = tiny_model().eval()
    before = model.config._attn_implementation
    expected = model(torch.tensor([[1, 2, 3]])).logits
    states(model.model, rows())
    assert model.config._attn_implementation == before
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, expected)


def test_what_cannot_be_packed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    window = MistralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    assert not packable(MistralModel(window).eval())
    assert not packable(object())
    model = tiny_model().eval().model
    # A model whose states run on from row to row, as a recurrent one's would.
    plain = type(model).forward

    def leaking(self: Any, *arguments: Any, **options: Any) -> Any:
        output = plain(self, *arguments, **options)
        output.last_hidden_state = output.last_hidden_state.cumsum(1)
        return output

    monkeypatch.setattr(type(model), "forward", leaking)
    assert not packable(model)


def test_each_common_beginning_is_there_once() -> None:
    # 7 8 of three rows, then 9 of two; a row that is a beginning; 9 after other tokens, and in another place.
    ids, positions, tokens = without_repetition([[7, 8, 9, 4], [7, 8, 9], [7, 8, 5], [9, 8], []])
    assert ids == [7, 8, 9, 4, 5, 9, 8]
    assert positions == [0, 1, 2, 3, 2, 0, 1]
    assert tokens == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 4], [5, 6], []]


def test_attention_gets_rows_longest_first_with_pads_and_gives_each_token_back_once() -> None:
    # Lengths 19 and 20 share a group (39 tokens and one pad: 2.6 %), 5 has its own.
    rows = [list(range(5)), [*range(5), *range(20, 34)], list(range(40, 60))]
    ids, _, tokens = without_repetition(rows)
    found = packing.layout(tokens, count=len(ids), device=CPU)
    assert found.groups == [(2, 20), (1, 5)]
    assert [ids[token] for token in found.tokens.tolist()] == [*rows[2], *rows[1], 33, *rows[0]]
    assert [ids[found.tokens[place]] for place in found.places.tolist()] == ids
    assert found.places.tolist() == [*range(20, 39), *range(20)]  # the beginning from the row that comes first there


def test_attention_sees_few_pads() -> None:
    lengths = torch.randint(0, 120, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = similar_lengths(lengths, CPU)
    assert sorted(row for group in groups for row in group) == [row for row in range(40) if lengths[row]]
    assert sum(len(group) * lengths[group[0]] for group in groups) <= 1.05 * sum(lengths)
    assert len(groups) < 20


def test_what_is_not_finite_in_a_row_stays_there() -> None:
    model = tiny_model().eval().model
    with torch.no_grad():
        model.embed_tokens.weight[9] = torch.nan
    # Two rows of almost one length share a group, so that one of them has a pad; the row with the NaN comes first.
    batch = collate([[9, 1], [1, 2, 3], [1, 2, 3]], [[4], [4] * 20, [5] * 19], range(3), pad_id=0, device=CPU)
    assert [bool(row.isfinite().all()) for row in states(model, batch)] == [False, True, True]


def test_the_gradients_of_a_shared_token_are_added_up_unrounded() -> None:
    # 256 rows give a token 1 each; in bfloat16, whose numbers have 8 bits, 256 + 1 is 256. One row more gives 2.
    tokens = torch.tensor([0] * 257 + [1])
    flat = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.tensor([1.0] * 256 + [2.0, 3.0], dtype=torch.bfloat16)[:, None, None]
    packing._Spread.apply(flat, tokens, torch.tensor([0, 257]), False).backward(upstream)
    assert flat.grad is not None and flat.grad.flatten().tolist() == [258.0, 3.0]


def test_gradients_of_bfloat16_rows_are_those_of_the_same_numbers_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    shapes = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    rows = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    upstream = torch.randn((2, 9, 4, 8), generator=generator).bfloat16()
    found = torch.autograd.grad(packing._causal(module, rows, {"scaling": 0.3}), rows, upstream)
    query, key, value = exact = [row.detach().double().requires_grad_() for row in rows]
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = (0.3 * query @ key.mT).masked_fill(later, -torch.inf).softmax(-1)
    expected = torch.autograd.grad((weights @ value).transpose(1, 2), exact, upstream.double())
    for one, other in zip(found, expected, strict=True):
        # Only the result is rounded, to 8 bits.
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-5)
