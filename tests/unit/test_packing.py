"""Rows without pads: the states and gradients of padded rows, and of each row alone.

Mutations that must fail here: attention over the whole sequence; positions that run on; models with windows packed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model, LlamaForCausalLM, MistralConfig, MistralModel, PreTrainedModel

from rlhf_core.models import packing
from rlhf_core.models.batching import Batch, collate
from rlhf_core.models.packing import packable, packed_states
from tests.tiny import tiny_model

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [[1, 70], [1, 71, 72, 73], [5]], [[80, 81, 2], [82, 83, 84, 85, 86, 4], [87, 88]]


def rows() -> Batch:
    return collate(PROMPTS, RESPONSES, range(3), pad_id=0, device=CPU)


def states(model: Any, batch: Batch) -> Tensor:
    found: Tensor = packed_states(model, batch.input_ids, batch.position_ids, batch.attention_mask)
    return found


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2))
    return model.eval()


@pytest.mark.parametrize("make", [lambda: tiny_model().eval().model, gpt2])
def test_every_row_has_the_states_and_gradients_that_it_has_alone(make: Any) -> None:
    model, batch = make().double(), rows()
    assert packable(model)
    found = states(model, batch)
    weights = torch.arange(found.shape[-1], dtype=torch.float64)
    gradients = []
    for one in (True, False):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for place, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            ids = [*prompt, *response]
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(found[place, : len(ids)], alone, rtol=1e-6, atol=1e-6)
            assert not found[place, len(ids) :].any()
            loss = loss + ((found[place, : len(ids)] if one else alone) * weights).sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


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


def test_attention_sees_few_pads_and_every_row_in_order() -> None:
    lengths = sorted(torch.randint(1, 120, (40,), generator=torch.Generator().manual_seed(0)).tolist(), reverse=True)
    groups = packing.grouped([*lengths, 0], CPU)
    assert sum(group.count * group.width for group in groups) <= 1.05 * sum(lengths)
    assert len(groups) < 20 and sum(group.count for group in groups) == 40
    assert [group.tokens.start for group in groups] == [0, *(group.tokens.stop for group in groups[:-1])]
    even = packing.grouped([7, 7, 7], CPU)
    assert [(group.count, group.width, group.places) for group in even] == [(3, 7, None)]


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
