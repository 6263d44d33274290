"""A language model as judge behind a real server: vLLM's own, with a tiny model that says digits."""

from pathlib import Path

import httpx
import pytest
import torch

from rlhf_core.errors import RewardError
from rlhf_core.reward.llm_judge import judge_scores, reply_reader
from rlhf_core.reward.service import open_service
from tests.judge_server import NAME, alive, save_digit_model, serve_vllm
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.vllm

TEMPLATE = "Question: {prompt} Answer: {response} How good is it, from 0 to 999?"


def rows(*responses: str) -> list[dict]:
    return [
        {"sample_id": f"1-p0-{index}", "prompt": "Where?", "response": response, "ground_truth": None}
        for index, response in enumerate(responses)
    ]


def test_a_judge_on_vllm_is_asked_and_its_digits_are_the_scores(tmp_path: Path) -> None:
    model, tokenizer = save_digit_model(tmp_path / "model"), tiny_tokenizer()
    given = rows("Here.", "There, I think.", "")

    def digits(response: str) -> str:
        """What transformers says: three most probable tokens after the same turn in the model's own template."""
        message = [{"role": "user", "content": f"Question: Where? Answer: {response} How good is it, from 0 to 999?"}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = model.generate(ids, max_new_tokens=3, do_sample=False)
        return str(tokenizer.decode(found[0, ids.shape[1] :]))

    def judged(at: str, pattern: str, kept: str, name: str = NAME, template: str = TEMPLATE) -> list[float]:
        request = {"model": name, "temperature": 0.0, "max_tokens": 3}
        options = {"timeout_s": 60.0, "retries": 1, "backoff_s": 0.0, "auth_env": None}
        with open_service(f"{at}/v1/chat/completions", **options) as service:
            return judge_scores(
                service, given, tmp_path / kept, "reward source x, part-0", request=request, template=template,
                read=reply_reader(pattern, 0.0, 999.0, nonfinite="error"), concurrency=2, nonfinite="error",
            )  # fmt: skip

    expected = [float(digits(row["response"])) for row in given]
    assert len(set(expected)) == 3
    with serve_vllm(tmp_path / "model", tmp_path / "log") as (at, group):
        assert judged(at, r"^(\d{3})$", "a") == expected
        with pytest.raises(RewardError, match=r"sample 1-p0-0: .*the reply does not match 'Score: .*: '\d{3}' \(try 2"):
            judged(at, r"Score: (\d+)", "b")
        with pytest.raises(RewardError, match=r"sample 1-p0-0: .*: status 404: .*no-such-model"):
            judged(at, r"(\d+)", "c", name="no-such-model")
        with pytest.raises(RewardError, match=r"sample 1-p0-0: .*: status 400: .*256"):
            judged(at, r"(\d+)", "d", template="more tokens than the server takes " * 10)
        assert alive(group)
    assert not alive(group)  # nor the engine's own process
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{at}/health", trust_env=False)
