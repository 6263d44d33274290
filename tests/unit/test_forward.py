"""Logprobs, values and scores of response tokens: alignment, padding, temperature, chunks, memory."""

from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from rlhf_core.models.batching import collate, token_budget_batches
from rlhf_core.models.critic import Critic
from rlhf_core.models.forward import (
    _kl_of_rows,
    cut_rows,
    for_all_rows,
    full_kl,
    sequence_scores,
    token_outputs,
    without_pads,
)
from rlhf_core.models.head import head_statistics
from rlhf_core.models.memory import TokenBudget
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def outputs(model, prompts, responses, rows=None, *, temperature=1.0, chunk=64, head=None, pad_id=0):
    batch = collate(prompts, responses, rows or range(len(prompts)), pad_id=pad_id, device=CPU)
    return token_outputs(
        model,
        batch,
        temperature=temperature,
        logits_chunk_tokens=chunk,
        precision="float32",
        critic=None if head is None else Critic(head),
    )


class PositionModel(nn.Module):
    """Hidden state of position p is [10 + p]; logits give the next token the logprob -(p + 1) / 10."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.head = PositionHead(vocabulary)
        self.base_model = lambda input_ids, position_ids, use_cache: SimpleNamespace(
            last_hidden_state=(10.0 + position_ids)[..., None].float()
        )

    def get_output_embeddings(self):
        return self.head


class PositionHead(nn.Module):
    """Stands for a linear layer 1 -> V whose logits are [l, 0] with log softmax(l) = -(p + 1) / 10."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.weight, self.bias = torch.zeros(vocabulary, 1), None


def test_values_and_logprobs_are_those_of_the_state_before_each_token(monkeypatch):
    # Prompt 11, 12, 13, response 21, 22: states at positions 2 and 3 precede the response tokens, so the values of a
    # head that returns the hidden state (10 + position) are 12 and 13, not 13 and 14; after the last token, 14. An
    # empty response to a prompt of two tokens has no values, and 11 after it.
    identity = nn.Linear(1, 1)
    nn.init.ones_(identity.weight)
    nn.init.zeros_(identity.bias)
    from rlhf_core.models import forward

    def statistics(hidden, weight, bias, targets, **_):
        return -(hidden[:, 0] - 9) / 10, torch.zeros(len(targets))  # row p -> -(p + 1) / 10

    monkeypatch.setattr(forward, "head_statistics", statistics)
    found = outputs(PositionModel(30), [[11, 12, 13], [11, 12]], [[21, 22], []], head=identity)
    assert found.values.tolist() == [12.0, 13.0]
    assert found.bootstrap_values.tolist() == [14.0, 11.0]
    assert found.logprobs.tolist() == pytest.approx([-0.3, -0.4])


def test_predictors_and_targets_of_two_rows():
    # Width 5. Row 0: prompt 3, response 2 -> states 2, 3. Row 1: prompt 1, response 1 -> state 5 + 0.
    batch = collate([[11, 12, 13], [7]], [[21, 22], [8]], [0, 1], pad_id=0, device=CPU)
    assert batch.predictors.tolist() == [2, 3, 5]
    assert batch.targets.tolist() == [21, 22, 8]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


@pytest.mark.parametrize("pad_id", [0, 2])
def test_eos_is_a_target_once_even_when_it_is_the_pad_id(pad_id):
    ended = collate([[5], [5, 6]], [[8, 9, 2], [3, 3, 3, 3]], [0, 1], pad_id=pad_id, device=CPU)
    assert ended.targets.tolist() == [8, 9, 2, 3, 3, 3, 3]
    cut_off = collate([[5], [5, 6]], [[8, 9, 7], [3, 3, 3, 3]], [0, 1], pad_id=pad_id, device=CPU)
    assert cut_off.targets.tolist() == [8, 9, 7, 3, 3, 3, 3]  # no EOS is invented
    assert cut_off.lengths == [3, 4]


def test_logprobs_and_entropy_equal_log_softmax_of_the_whole_model():
    model = tiny_model().eval()
    prompt, response = [1, 70, 80], [90, 5, 6, 2]
    found = outputs(model, [prompt], [response], temperature=0.7, chunk=3)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, 2:6] / 0.7
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(found.logprobs.double(), expected.gather(1, torch.tensor(response)[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(found.entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5)


def test_temperature_divides_the_logits():
    # logits [2, 1, 0], token 1: log softmax is -1.407606 at temperature 1 and -2.142932 at 0.5.
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    for temperature, expected in ((1.0, -1.407606), (0.5, -2.142932)):
        logprobs, _ = head_statistics(
            hidden, weight, None, torch.tensor([1]), temperature=temperature, logits_chunk_tokens=4
        )
        assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_a_token_that_the_head_forbids_adds_nothing_and_leaves_the_gradients_finite():
    # Logits [log 3, 0, -inf], as of a vocabulary padded with a bias of -inf: p = [3/4, 1/4, 0], entropy
    # log 4 - 3/4 log 3 = .562335, and d entropy / d logit = -p (log p + entropy) = [-.205990, .205990, 0].
    bias = torch.tensor([np.log(3), 0.0, -np.inf], dtype=torch.float32, requires_grad=True)
    hidden, targets = torch.zeros(3, 2), torch.tensor([0, 1, 2])
    logprobs, entropy = head_statistics(
        hidden, torch.zeros(3, 2), bias, targets, temperature=1.0, logits_chunk_tokens=2
    )
    # A forbidden token that was sampled all the same keeps the -inf that shows it.
    assert logprobs.tolist() == pytest.approx([np.log(0.75), np.log(0.25), -np.inf], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.562335] * 3, abs=1e-6)
    (entropy[0] + logprobs[0]).backward()
    # d logprob_0 / d logit = [1, 0, 0] - p = [.25, -.25, 0].
    assert bias.grad.tolist() == pytest.approx([0.25 - 0.205990, 0.205990 - 0.25, 0.0], abs=1e-5)


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def test_a_row_scores_the_same_alone_and_in_a_padded_batch_with_learned_positions():
    model, head = gpt2().eval(), nn.Linear(32, 1)
    prompts, responses = [[3, 4], [5, 6, 7, 8, 9, 10], [11] * 9], [[12, 13, 2], [14], [15] * 8]
    together = outputs(model, prompts, responses, head=head)
    alone = [outputs(model, prompts, responses, [row], head=head) for row in range(3)]
    assert torch.allclose(together.logprobs, torch.cat([one.logprobs for one in alone]), atol=1e-5)
    assert torch.allclose(together.values, torch.cat([one.values for one in alone]), atol=1e-5)
    # The short row against the model itself, which has never seen a pad.
    logits = model(torch.tensor([[3, 4, 12, 13, 2]])).logits[0]
    expected = torch.log_softmax(logits, -1)[[1, 2, 3], [12, 13, 2]]
    assert torch.allclose(alone[0].logprobs, expected, atol=1e-5)
    # Negative control: positions that start at the pads of a left-padded row are far off.
    shifted = model(torch.tensor([[0] * 10 + [3, 4, 12, 13, 2]])).logits[0]
    assert (torch.log_softmax(shifted, -1)[[11, 12, 13], [12, 13, 2]] - expected).abs().max() > 0.01


def test_gradients_do_not_depend_on_the_chunk_size():
    gradients = []
    for chunk in (1, 3, 100):
        model, head = tiny_model(), nn.Linear(64, 1)
        torch.nn.init.ones_(head.weight)
        found = outputs(model, [[1, 70], [1, 71, 72]], [[9, 8, 7], [6, 5]], chunk=chunk, head=head)
        (found.logprobs.sum() + 0.3 * found.entropy.sum() + found.values.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(gradients[0], gradients[2], rtol=1e-4, atol=1e-4)
    assert torch.allclose(gradients[1], gradients[2], rtol=1e-4, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor):
                self.largest = max(self.largest, item.numel())
        return result


def test_no_full_vocabulary_tensor_beyond_one_chunk():
    vocabulary, rows, prompt, response, chunk = 50_257, 2, 100, 64, 16
    model = tiny_model(vocab_size=vocabulary).eval()
    ids = torch.randint(5, 1000, (rows, prompt + response)).tolist()
    prompts, responses = [row[:prompt] for row in ids], [row[prompt:] for row in ids]
    parameters = max(p.numel() for p in model.parameters())
    with torch.no_grad(), LargestTensor() as seen:
        found = outputs(model, prompts, responses, chunk=chunk)
    assert seen.largest <= max(chunk * vocabulary, parameters)
    assert max(chunk * vocabulary, parameters) < rows * response * vocabulary / 1.9  # else the line above says nothing
    whole = torch.log_softmax(model(torch.tensor(ids)).logits, -1)[:, prompt - 1 : -1]
    expected = whole.gather(-1, torch.tensor(responses)[..., None]).flatten()
    assert torch.allclose(found.logprobs, expected, atol=1e-5)


def test_full_kl_of_three_tokens_by_hand():
    # p = [.5, .25, .25], q = [.25, .25, .5]: .5 log 2 + 0 - .25 log 2 = .173287. The same against p itself: 0.
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert _kl_of_rows(p, q).item() == pytest.approx(0.25 * np.log(2), rel=1e-6)
    assert _kl_of_rows(p, p).item() == 0.0
    # p = [1 - e, e], q = [e, 1 - e] with e = exp(-30): (1 - 2e)(log(1 - e) + 30) = 30 to 12 digits; d reaches -30.
    sure = torch.tensor([[0.0, -30.0]])
    assert _kl_of_rows(sure, sure.flip(-1)).item() == pytest.approx(30.0, rel=1e-6)


def test_full_kl_of_forbidden_tokens_is_the_limit():
    # p = [1/2, 1/2, 0]. Against itself 0; against [1/4, 1/2, 1/4] .5 log 2 = .346574; the other way round infinite.
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert _kl_of_rows(p, p).item() == 0.0
    assert _kl_of_rows(p, q).item() == pytest.approx(0.5 * np.log(2), rel=1e-6)
    assert _kl_of_rows(q, p).item() == np.inf


def test_full_kl_keeps_its_digits_when_it_is_tiny():
    # Logits of 5000 tokens moved by 1e-4: KL is near 5e-9, below the rounding of a plain sum of float32 terms.
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 5000, dtype=torch.float64)
    moved = (logits + 1e-4 * torch.randn(4, 5000, dtype=torch.float64)).float()
    log_p, log_q = (torch.log_softmax(x.double(), -1) for x in (logits.float(), moved))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    found = _kl_of_rows(torch.log_softmax(logits.float(), -1), torch.log_softmax(moved, -1))
    assert found.double().numpy() == pytest.approx(expected.numpy(), rel=0.02)
    assert expected.max() < 1e-8 and (found >= 0).all()


@pytest.mark.parametrize("block", [1, 2**19])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_full_kl_equals_log_softmax_of_both_models(chunk, block, monkeypatch):
    monkeypatch.setattr("rlhf_core.models.head._BLOCK", block)
    policy, reference = tiny_model(0).eval(), tiny_model(1).eval()
    prompts, responses = [[1, 70, 80], [5]], [[90, 5, 6, 2], []]
    batch = collate(prompts, responses, [0, 1], pad_id=0, device=CPU)
    options = {"temperature": 0.7, "logits_chunk_tokens": chunk, "precision": "float32"}
    with torch.no_grad():
        found = full_kl(policy, reference, batch, **options)
        ids = torch.tensor([prompts[0] + responses[0]])
        log_p, log_q = (torch.log_softmax(m(ids).logits[0, 2:6].double() / 0.7, -1) for m in (policy, reference))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert found.double().numpy() == pytest.approx(expected.numpy(), rel=1e-4)
    assert full_kl(policy, policy, batch, **options).tolist() == [0.0] * 4


def test_full_kl_holds_no_full_vocabulary_tensor_beyond_half_a_chunk():
    vocabulary, rows, response, chunk = 50_257, 2, 64, 128
    policy, reference = (tiny_model(seed, vocab_size=vocabulary).eval() for seed in (0, 1))
    parameters = max(p.numel() for p in policy.parameters())
    ids = torch.randint(5, 1000, (rows, 20 + response)).tolist()
    batch = collate([row[:20] for row in ids], [row[20:] for row in ids], range(rows), pad_id=0, device=CPU)
    with torch.no_grad(), LargestTensor() as seen:
        full_kl(policy, reference, batch, temperature=0.7, logits_chunk_tokens=chunk, precision="float32")
    assert seen.largest <= max(chunk // 2 * vocabulary, parameters) < rows * response * vocabulary / 1.9


def test_logprobs_are_float32_under_bfloat16_products():
    batch = collate([[1, 70]], [[9, 8, 7]], [0], pad_id=0, device=CPU)
    found = token_outputs(
        tiny_model().eval(), batch, temperature=1.0, logits_chunk_tokens=8, precision="bf16-autocast", critic=None
    )
    assert found.logprobs.dtype == torch.float32


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_labels=1, pad_token_id=2, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval()


def test_the_score_is_read_at_the_last_real_token_when_pad_is_eos():
    # Ids 5 6 2 7 2, then two pads of id 2: position 4, not 1 (before the first 2), not 3 (last id that is not 2).
    model = classifier()
    batch = collate([[5, 6], [5] * 5], [[2, 7, 2], [6, 6]], [0, 1], pad_id=2, device=CPU)
    hidden = model.model(torch.tensor([[5, 6, 2, 7, 2]])).last_hidden_state[0]
    by_position = model.score(hidden)[:, 0]
    found = sequence_scores(model, batch, precision="float32")[0]
    assert found.item() == pytest.approx(by_position[4].item(), abs=1e-5)
    assert abs(found.item() - by_position[1].item()) > 1e-3 and abs(found.item() - by_position[3].item()) > 1e-3


@pytest.mark.parametrize("max_batch_tokens", [1, 12, 1000])
def test_scores_do_not_depend_on_batch_size_or_order(max_batch_tokens):
    model = classifier()
    prompts, responses = [[5], [6, 7], [8] * 4], [[], [9, 2], [10] * 5]
    alone = [
        sequence_scores(model, collate(prompts, responses, [row], pad_id=2, device=CPU), precision="float32")
        for row in range(3)
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        found = for_all_rows(
            lambda batch: list(sequence_scores(model, batch, precision="float32")),
            [prompts[row] for row in order],
            [responses[row] for row in order],
            packed=without_pads(model),
            budget=TokenBudget(max_batch_tokens),
            pad_id=2,
            device=CPU,
            progress=lambda rows: None,
        )
        assert np.allclose([float(score) for score in found], [alone[row].item() for row in order], atol=1e-5)


def test_batches_hold_every_row_once_within_the_budget():
    lengths = [3, 100, 7, 7, 50, 1, 20]
    batches = token_budget_batches(lengths, max_batch_tokens=60)
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 60


@pytest.mark.parametrize("device, pads", [("cpu", 1.05), ("cuda", 1.5)])
def test_responses_to_one_prompt_stay_together_where_prompts_are_computed_once(device, pads):
    generator = np.random.default_rng(0)
    prompts = [[prompt] * (5 + prompt) for prompt in generator.integers(0, 9, 60).tolist()]
    responses = [[7] * int(length) for length in generator.integers(0, 30, 60)]
    rows = [row for row in range(60) if row % 7]
    options = {"max_batch_tokens": 200, "device": torch.device(device)}
    batches = cut_rows(prompts, responses, rows, packed=True, **options)
    assert sorted(row for batch in batches for row in batch) == rows
    for batch in batches:
        lengths = [len(prompts[row]) + len(responses[row]) for row in batch]
        assert len(batch) == 1 or min(pads * sum(lengths), len(lengths) * max(lengths)) <= 200
    # In how many batches a prompt is: once, and once more for each batch that it filled up.
    of_prompt = [[prompts[row][0] for row in batch] for batch in batches]
    assert [key for key, _ in groupby(p for batch in of_prompt for p in batch)] == list(
        dict.fromkeys(p for batch in of_prompt for p in batch)
    )
    padded = cut_rows(prompts, responses, rows, packed=False, **options)
    assert len({tuple(prompts[row]) for row in padded[0]}) > 1  # by length alone
    whole = cut_rows([[1], [2], [1]], [[], [3] * 500, [4]], [0, 1, 2], packed=True, **options)
    assert whole == [[1], [2, 0]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_without_pads_is_full_and_its_rectangle_is_bounded(device):
    options = {"max_batch_tokens": 2048, "packed": True, "device": torch.device(device)}
    same = cut_rows([[1]] * 17, [[7] * 127] * 17, range(17), **options)
    assert [len(batch) for batch in same] == [16, 1]  # 16 * 128 = 2048
    # One row of 1,000 takes 15 of one token along: 16 rows of 1,000 places, within 8 for each token of the budget.
    long = cut_rows([[1]] * 40, [[7] * 999, *[[]] * 39], range(40), **options)
    assert [len(batch) for batch in long] == [16, 24]


def test_classifiers_that_pool_by_themselves_run_with_pads():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    causal = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=1, is_decoder=True, **sizes)).eval()
    assert not without_pads(causal)
    assert without_pads(tiny_model().eval())
