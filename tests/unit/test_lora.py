"""Adapters beside linear layers, and what is left of them in the weights.

Mutations that must fail here: no scaling; the transpose of a Conv1D; adapters in frozen layers; a random pooler frozen;
an adapter left in the model; rank and alpha swapped; stored adapters not taken back, or taken back after rounding.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_core.errors import ConfigError
from rlhf_core.models.batching import collate
from rlhf_core.models.forward import token_outputs
from rlhf_core.models.loading import new_classifier
from rlhf_core.training.lora import add_adapters, head_parameters, merge, merged, policy_adapters
from rlhf_core.training.reward_model import freeze_lowest
from tests.ppo_case import NO_STATE, PROMPTS, RESPONSES
from tests.tiny import tiny_model
from tests.tiny_encoder import save_encoder

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 7, 9, 11, 3], [8, 6, 4, 10, 12]])
LLAMA = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
OPTIONS = {"rank": 2, "alpha": 6.0, "targets": None, "seed": 3}


def save_gpt2(directory):
    """A decoder whose linear layers are Conv1D, with weights [in, out]."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2, pad_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(params=["llama", "gpt2", "bert"])
def directory(request, tiny_dir, tmp_path):
    return {"llama": lambda: tiny_dir, "gpt2": lambda: save_gpt2(tmp_path), "bert": lambda: save_encoder(tmp_path)}[
        request.param
    ]()


def classifier(directory):
    model = new_classifier(directory, device=CPU, precision="float32", seed=0)
    model.config.pad_token_id = 0
    return model


def adapted_classifier(directory, *, frozen=0, **options):
    model = classifier(directory)
    freeze_lowest(model, frozen)
    return model, add_adapters(model, **{**OPTIONS, **options}, whole=head_parameters(model))


def step(model):
    """Move every trained parameter, as if many steps had been taken."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.double().numpy()


def weights(model):
    return {name: value.detach().double().numpy().copy() for name, value in model.state_dict().items()}


def rank(matrix):
    values = np.linalg.svd(matrix, compute_uv=False)
    return int((values > 1e-5 * values[0]).sum())


def test_adapters_change_nothing_before_the_first_step(directory):
    assert np.array_equal(logits(adapted_classifier(directory)[0]), logits(classifier(directory)))


def test_the_merged_model_is_the_trained_one_and_has_no_adapters(directory):
    model, adapted = adapted_classifier(directory)
    before = logits(model)
    step(model)
    trained = logits(model)
    merge(adapted)
    assert np.abs(trained - before).max() > 0.1
    np.testing.assert_allclose(logits(model), trained, atol=1e-5)
    assert model.state_dict().keys() == classifier(directory).state_dict().keys()


def test_merging_changes_target_layers_by_a_matrix_of_low_rank_and_no_other(directory):
    model, adapted = adapted_classifier(directory, frozen=1)
    base = weights(model)
    base = {name.replace(".base_layer", ""): value for name, value in base.items() if "lora_" not in name}
    parts = {name.split(".lora_A")[0] + ".weight": name for name, _ in model.named_parameters() if ".lora_A." in name}
    step(model)
    found = dict(model.named_parameters())
    # alpha / rank = 3; a Conv1D's weight is [in, out], the transpose of a linear layer's.
    transpose = "gpt2" in str(type(model)).lower()
    expected = {}
    for name, a in parts.items():
        update = 3 * (found[a.replace("lora_A", "lora_B")] @ found[a]).detach().double().numpy()
        expected[name] = update.T if transpose else update
    merge(adapted)
    heads = {id(parameter) for parameter in head_parameters(model)}
    named = dict(model.named_parameters())
    for name, value in weights(model).items():
        change = value - base[name]
        if name in expected:
            assert rank(change) == 2
            np.testing.assert_allclose(change, expected[name], atol=1e-5)
        elif name in named and id(named[name]) in heads:
            assert np.abs(change).max() > 0
        else:
            assert not change.any(), name
    assert expected and not any(".0." in name for name in expected)  # the lower of two layers is frozen


def test_every_linear_layer_of_the_layers_gets_one(tiny_dir, tmp_path):
    model, _ = adapted_classifier(tiny_dir)
    names = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert names == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in LLAMA}
    encoder, _ = adapted_classifier(save_encoder(tmp_path))
    learning = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert not any("pooler" in name and "lora" in name for name in learning)
    assert {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight"} <= learning
    assert all("lora_" in name or "pooler" in name or name.startswith("classifier") for name in learning)


def test_only_the_named_layers_get_one(tiny_dir):
    model, _ = adapted_classifier(tiny_dir, targets=["v_proj", "up_proj"])
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.split(".")[-4] for name in learning if "lora_" in name} == {"v_proj", "up_proj"}
    # 2 layers, each v_proj 2 x (64 + 64) and up_proj 2 x (64 + 128), and the head of 64.
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert count == 2 * (2 * 128 + 2 * 192) + 64


def test_a_name_that_is_no_layer_is_refused_with_those_that_are(tiny_dir):
    with pytest.raises(ConfigError, match=r"query is no linear layer that learns; Llama.* has down_proj, gate_proj"):
        adapted_classifier(tiny_dir, targets=["query", "q_proj"])
    with pytest.raises(ConfigError, match="none"):
        adapted_classifier(tiny_dir, frozen=2)


def test_the_seed_decides_where_adapters_start(tiny_dir):
    starts = [weights(adapted_classifier(tiny_dir, seed=seed)[0]) for seed in (1, 1, 2)]
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert np.array_equal(starts[0][name], starts[1][name]) and not np.array_equal(starts[0][name], starts[2][name])


def test_adapters_of_rounded_weights_are_float32_and_are_added_before_rounding(tiny_dir):
    model = new_classifier(tiny_dir, device=CPU, precision="bfloat16", seed=0)
    adapted = add_adapters(model, **OPTIONS, whole=head_parameters(model))
    step(model)
    named = dict(model.named_parameters())
    place = "model.layers.1.mlp.down_proj"
    a, b = (named[f"{place}.lora_{part}.default.weight"] for part in "AB")
    assert a.dtype == torch.float32
    expected = (named[f"{place}.base_layer.weight"].float() + 3 * (b @ a)).to(torch.bfloat16)
    merge(adapted)
    assert torch.equal(dict(model.named_parameters())[f"{place}.weight"], expected)


def moved(model, generator):
    """The model with adapters away from zero, as an update leaves it: the published weights, and the state."""
    adapted = policy_adapters(model, NO_STATE, **OPTIONS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    tensors = {f"policy.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return adapted, dataclasses.replace(NO_STATE, steps={"policy": 1}, adapters=tensors)


@pytest.mark.parametrize("precision, rounding", [("float32", 1e-5), ("bf16-autocast", 0.0)])
def test_stored_adapters_start_at_the_published_policy_in_every_precision(precision, rounding):
    base = tiny_model().to(torch.bfloat16).float().eval()  # as policy 0: its weights are bfloat16 numbers
    adapted, state = moved(copy.deepcopy(base), torch.Generator().manual_seed(1))
    published = merged(adapted, copy.deepcopy(base))
    going_on = copy.deepcopy(published)
    policy_adapters(going_on, state, **OPTIONS)
    batch = collate(PROMPTS, RESPONSES, range(4), pad_id=0, device=CPU)

    def logprobs(model):
        with torch.no_grad():
            options = {"temperature": 0.7, "logits_chunk_tokens": 64, "critic": None}
            return token_outputs(model, batch, precision=precision, **options).logprobs.double().numpy()

    assert np.abs(logprobs(published) - logprobs(base)).max() > 0.1
    assert np.abs(np.expm1(logprobs(going_on) - logprobs(published))).max() <= rounding


@pytest.mark.parametrize(
    "make", [lambda path: tiny_model(), lambda path: GPT2LMHeadModel.from_pretrained(save_gpt2(path))]
)
def test_what_is_published_is_the_base_and_the_adapters_whatever_was_published_between(make, tmp_path):
    base = make(tmp_path).eval()
    adapted, state = moved(copy.deepcopy(base), torch.Generator().manual_seed(1))
    first = merged(adapted, copy.deepcopy(base))
    second = copy.deepcopy(first)
    adapted = policy_adapters(second, state, **OPTIONS)
    step(second)
    inputs, trained = torch.tensor([[5, 7, 9]]), copy.deepcopy(second)
    found = merged(adapted, first)
    with torch.no_grad():
        np.testing.assert_allclose(found(inputs).logits.numpy(), trained(inputs).logits.numpy(), rtol=1e-4, atol=2e-4)
    named, plain = dict(second.named_parameters()), dict(base.named_parameters())
    for name in (name for name in named if ".lora_A." in name):
        product = 3 * (named[name.replace("lora_A", "lora_B")] @ named[name]).detach()
        place = name.split(".lora_A")[0] + ".weight"
        expected = plain[place] + (product.T if "gpt2" in str(type(base)).lower() else product)
        np.testing.assert_allclose(found.get_parameter(place).detach().numpy(), expected.detach().numpy(), atol=1e-5)


def test_no_adapters_of_rank_0():
    model = tiny_model()
    assert policy_adapters(model, NO_STATE, **OPTIONS | {"rank": 0}) is None
    assert all(parameter.requires_grad for parameter in model.parameters())
