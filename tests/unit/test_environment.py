"""What a stage ran on: recorded, compared, secret of nothing, and in no artifact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_core.config import ComputeParams, SamplingParams, load_run
from rlhf_core.environment import differences, environment, environment_path, warn_of_slow_bfloat16
from rlhf_core.models import loading

ROOT = Path(__file__).parents[2]


def test_it_names_packages_processor_and_threads_and_no_other_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = environment()
    assert found["threads"]["OMP_NUM_THREADS"] == "3" and "secret" not in json.dumps(found)
    assert {"torch", "transformers", "pyarrow"} <= set(found["packages"])
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["processor"]["model"]
    assert environment() == found


def test_the_lock_is_that_of_the_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert environment()["lock"] is None
    (tmp_path / ".setup.json").write_text('{"accel": "gpu", "main": "a1"}')
    assert environment()["lock"] == {"accel": "gpu", "sha256": "a1"}


@pytest.mark.parametrize(
    ("core", "slow"),
    [
        ({"flags": "fpu sse2 avx avx2 fma"}, True),
        ({"flags": "fpu avx2 avx512f avx512cd"}, True),
        ({"flags": "fpu avx2 avx512f avx512dq avx512bw avx512vl"}, False),
        ({"Features": "fp asimd"}, True),
        ({"Features": "fp asimd sve bf16"}, False),
        ({}, False),
    ],
)
def test_a_processor_that_is_slow_in_bfloat16_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, core: dict[str, str], slow: bool
) -> None:
    warn_of_slow_bfloat16.cache_clear()
    monkeypatch.setattr("rlhf_core.environment._first_core", lambda: core)
    for _ in range(2):
        warn_of_slow_bfloat16("compute.precision")
    warn_of_slow_bfloat16.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == slow
    assert all("compute.precision asks for products in bfloat16" in line for line in said)


AVX2, AVX512 = {"flags": "fpu avx avx2 fma"}, {"flags": "avx2 avx512f avx512dq avx512bw avx512vl"}


@pytest.mark.parametrize(
    ("core", "gpu", "device", "precision", "dtype"),
    [
        (AVX2, False, "auto", "float32", "float32"),
        (AVX2, False, "cpu", "float32", "float32"),
        (AVX2, True, "auto", "bf16-autocast", "bfloat16"),
        (AVX2, True, "cuda", "bf16-autocast", "bfloat16"),
        (AVX2, True, "cpu", "float32", "bfloat16"),  # vLLM takes the GPU whatever compute.device is
        (AVX512, False, "auto", "bf16-autocast", "bfloat16"),
        (AVX512, False, "cpu", "bf16-autocast", "bfloat16"),
    ],
)
def test_auto_is_named_by_what_the_machine_is_fast_in(
    monkeypatch: pytest.MonkeyPatch, core: dict[str, str], gpu: bool, device: str, precision: str, dtype: str
) -> None:
    monkeypatch.setattr("rlhf_core.environment._first_core", lambda: core)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    params = load_run(ROOT).params
    compute, sampling = params.compute.model_dump(), params.sampling.model_dump()
    assert ComputeParams(**compute | {"device": device, "precision": "auto"}).precision == precision
    assert SamplingParams(**sampling | {"dtype": "auto"}).dtype == dtype
    for named in ("float32", "bf16-autocast", "bfloat16"):
        assert ComputeParams(**compute | {"device": device, "precision": named}).precision == named
    for named in ("float32", "bfloat16", "float16"):
        assert SamplingParams(**sampling | {"dtype": named}).dtype == named


@pytest.mark.parametrize("precision", ["float32", "bf16-autocast", "bfloat16"])
@pytest.mark.parametrize("load", ["load_causal_lm", "load_backbone", "new_classifier"])
def test_models_that_multiply_in_bfloat16_ask_whether_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, tiny_dir: Path, load: str, precision: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(loading, "warn_of_slow_bfloat16", asked.append)
    seed = {"seed": 0} if load == "new_classifier" else {}
    getattr(loading, load)(tiny_dir, device=torch.device("cpu"), precision=precision, **seed)
    assert asked == ([] if precision == "float32" else ["compute.precision"])


def test_differences_are_lines() -> None:
    before = {"python": "3.11.1", "packages": {"torch": "2.1"}, "cores": 2}
    now = {"python": "3.11.1", "packages": {"torch": "2.2", "vllm": "1"}, "cores": 2}
    assert differences(before, now) == ['packages.torch was "2.1", is "2.2"', 'packages.vllm was null, is "1"']
    assert differences(before, before) == []


def test_a_stage_records_what_it_ran_on_outside_of_its_outs(tmp_path: Path) -> None:
    code = 'from rlhf_core.stage import run_stage; run_stage("score@2", lambda: None)'
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    path = tmp_path / environment_path("score@2")
    assert json.loads(path.read_text())["platform"].startswith("Linux")
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == {path, tmp_path / ".work/score-2/lock"}
    assert ".work/" in (ROOT / ".gitignore").read_text().splitlines()
