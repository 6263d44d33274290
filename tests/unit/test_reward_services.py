"""Services that score, against a real server on loopback: well, slow, down, half down, or answering rubbish.

Mutations that must fail here: a retry fewer or more; no backoff, or not doubled; 401 tried again; 503 not; scores taken
without a check of their number or their values; kept scores asked for again; the token left out, or shown; a reply's
number outside its range taken; braces of a response filled in.
"""

import json
import logging
import socket
import time

import numpy as np
import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.reward.http_service import service_scores
from rlhf_core.reward.llm_judge import filled, judge_scores, reply_reader
from rlhf_core.reward.service import keep_scores, kept_scores, open_service
from tests.stub_server import by_length, serve

QUICK = {"timeout_s": 5.0, "retries": 2, "backoff_s": 0.0, "auth_env": None}
WHERE = "reward source x, part-0"


def rows(count: int) -> list[dict]:
    return [
        {
            "sample_id": f"1-p{index}-0",
            "prompt": "say {response}",
            "response": "a" * index,
            "prompt_ids": [1, 2],
            "response_ids": [5] * index,
            "ground_truth": index,
            "finish_reason": "stop",
        }
        for index in range(count)
    ]


def score(url: str, tmp_path, count=5, batch_size=2, nonfinite="error", **options) -> list[float]:
    kept = tmp_path / "kept.jsonl"
    with open_service(url, **{**QUICK, **options}) as service:
        return service_scores(service, rows(count), kept, WHERE, batch_size=batch_size, nonfinite=nonfinite)


# --- batches ------------------------------------------------------------------------------------------------------


def test_rows_go_in_batches_and_scores_come_back_in_order(tmp_path):
    with serve(by_length) as stub:
        assert score(stub.url, tmp_path) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(request["rows"]) for request in stub.requests] == [2, 2, 1]
    assert stub.requests[1]["rows"] == rows(5)[2:4]
    assert "Authorization" not in stub.headers[0]


def test_no_rows_are_no_request(tmp_path):
    with serve(by_length) as stub:
        assert score(stub.url, tmp_path, count=0) == []
    assert stub.requests == []


# --- trouble ------------------------------------------------------------------------------------------------------


def test_every_second_request_failing_still_scores_everything(tmp_path):
    with serve(lambda number, content: by_length(number, content) if number % 2 else (503, b"busy")) as stub:
        assert score(stub.url, tmp_path, retries=1) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(stub.requests) == 6


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"<html>oops", "not JSON: '<html>oops'"),
        ([1.0, 2.0], 'expected {"scores": [...]}'),
        ({"score": [1.0, 2.0]}, 'expected {"scores": [...]}'),
        ({"scores": 3.0}, 'expected {"scores": [...]}'),
        ({"scores": [1.0]}, "1 scores for 2 rows"),
        ({"scores": [1.0, 2.0, 3.0]}, "3 scores for 2 rows"),
        (b'{"scores": [1.0, NaN]}', "score of sample 1-p1-0 is nan"),
        (b'{"scores": [Infinity, 1.0]}', "score of sample 1-p0-0 is inf"),
        ({"scores": [1.0, 1e39]}, "score of sample 1-p1-0 is 1e+39"),
        ({"scores": [1.0, None]}, "score of sample 1-p1-0 is None"),
        ({"scores": ["1.0", 1.0]}, "score of sample 1-p0-0 is '1.0'"),
        ({"scores": [True, 1.0]}, "score of sample 1-p0-0 is True"),
        (b"\xff\xfe\x00", "not JSON"),
    ],
)
def test_an_answer_that_is_no_scores_is_asked_for_again_and_then_named(tmp_path, answer, words):
    with serve(lambda number, content: (200, answer)) as stub:
        with pytest.raises(RewardError) as caught:
            score(stub.url, tmp_path, retries=2)
    assert len(stub.requests) == 3
    text = str(caught.value)
    assert text.startswith(f"{WHERE}, samples 1-p0-0 to 1-p1-0: {stub.url}: ")
    assert words in text and "(try 3 of 3)" in text and "kept" in text


@pytest.mark.parametrize(
    "status, tries", [(408, 3), (429, 3), (500, 3), (503, 3), (400, 1), (401, 1), (404, 1), (302, 1)]
)
def test_a_status_is_tried_again_where_that_may_help(tmp_path, status, tries):
    with serve(lambda number, content: (status, b"why")) as stub:
        with pytest.raises(RewardError, match=f"status {status}: 'why'"):
            score(stub.url, tmp_path)
    assert len(stub.requests) == tries


def test_a_service_that_is_down_is_an_error(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RewardError, match=r"ConnectError.*\(try 3 of 3\)"):
        score(f"http://127.0.0.1:{port}/", tmp_path)


def test_a_service_that_is_slow_is_an_error(tmp_path):
    def slow(number, content):
        time.sleep(0.3)
        return by_length(number, content)

    with serve(slow) as stub:
        with pytest.raises(RewardError, match=r"ReadTimeout.*\(try 2 of 2\)"):
            score(stub.url, tmp_path, timeout_s=0.05, retries=1)
        assert score(stub.url, tmp_path, count=1) == [0.0]


def test_an_answer_that_trickles_meets_the_limit_too():
    with socket.create_server(("127.0.0.1", 0)) as server:
        import threading

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(40):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.03)

        thread = threading.Thread(target=trickle)
        thread.start()
        with open_service(
            f"http://127.0.0.1:{server.getsockname()[1]}/", timeout_s=0.1, retries=0, backoff_s=0.0, auth_env=None
        ) as at:
            with pytest.raises(RewardError, match=r"longer than timeout_s = 0\.1 s"):
                at.ask({}, lambda answer: answer, WHERE)
        thread.join()


def test_waits_double_from_try_to_try(tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("rlhf_core.reward.service.time.sleep", waits.append)
    with serve(lambda number, content: (500, b"")) as stub:
        with pytest.raises(RewardError):
            score(stub.url, tmp_path, retries=3, backoff_s=0.5)
    assert waits == [0.5, 1.0, 2.0]


# --- what is kept -------------------------------------------------------------------------------------------------


def test_what_was_scored_is_kept_and_not_asked_for_again(tmp_path):
    with serve(lambda number, content: by_length(number, content) if number < 2 else (500, b"")) as stub:
        with pytest.raises(RewardError, match="samples 1-p4-0 to 1-p4-0"):
            score(stub.url, tmp_path)
    with serve(by_length) as stub:
        assert score(stub.url, tmp_path) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [[row["sample_id"] for row in request["rows"]] for request in stub.requests] == [["1-p4-0"]]


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    path = tmp_path / "kept.jsonl"
    keep_scores(path, {"a": 1.0, "b": 2.0})
    path.write_text(path.read_text()[:-3])
    assert kept_scores(path, nonfinite="error") == {"a": 1.0}
    keep_scores(path, {"b": 3.0})
    assert kept_scores(path, nonfinite="error") == {"a": 1.0, "b": 3.0}


def test_what_was_dropped_is_kept_as_such_and_asked_for_again_where_it_is_an_error(tmp_path):
    def half_broken(number, content):
        return 200, b'{"scores": [NaN, 1.0]}'

    with serve(half_broken) as stub:
        for _ in range(2):
            found = score(stub.url, tmp_path, count=2, nonfinite="drop")
            assert np.isnan(found[0]) and found[1] == 1.0
        assert len(stub.requests) == 1
    with serve(by_length) as stub:
        assert score(stub.url, tmp_path, count=2) == [0.0, 1.0]
        assert [row["sample_id"] for row in stub.requests[0]["rows"]] == ["1-p0-0"]


# --- authentication -----------------------------------------------------------------------------------------------


def test_the_token_goes_into_the_request_and_nowhere_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MY_TOKEN", "s3cret\n")
    with serve(lambda number, content: (500, json.dumps({"got": stub_headers()}).encode())) as stub:

        def stub_headers() -> str:
            return "x" * 170 + stub.headers[-1]["Authorization"]

        with caplog.at_level(logging.DEBUG), pytest.raises(RewardError) as caught:
            score(stub.url, tmp_path, auth_env="MY_TOKEN")
    assert stub.headers[0]["Authorization"] == "Bearer s3cret"
    assert "***" in str(caught.value) and "s3cret" not in str(caught.value) + caplog.text
    assert "s3cr" not in str(caught.value)  # an excerpt may end within it


@pytest.mark.parametrize(
    "value, words", [(None, "is not set"), ("", "is not set"), ("a b", "spaces"), ("ä", "characters")]
)
def test_a_variable_without_a_token_is_named_without_its_value(tmp_path, monkeypatch, value, words):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_TOKEN", value)
    with pytest.raises(ConfigError, match=f"MY_TOKEN.*{words}") as caught:
        score("http://127.0.0.1:1/", tmp_path, auth_env="MY_TOKEN")
    assert "a b" not in str(caught.value)


# --- a language model as judge ------------------------------------------------------------------------------------


def completion(text) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judged(url: str, tmp_path, count=3, concurrency=1, nonfinite="error", **options) -> list[float]:
    with open_service(url, **{**QUICK, **options}) as service:
        return judge_scores(
            service,
            rows(count),
            tmp_path / "kept.jsonl",
            WHERE,
            request={"model": "m", "temperature": 0.0, "max_tokens": 9},
            template="Q: {prompt} A: {response} R: {ground_truth} {other}",
            read=reply_reader(r"Score: (-?[\d.]+|NaN)", 0.0, 10.0, nonfinite=nonfinite),
            concurrency=concurrency,
            nonfinite=nonfinite,
        )


def by_row(number, content):
    return 200, completion(f"Well. Score: {content['messages'][0]['content'].count('a')}")


@pytest.mark.parametrize("concurrency", [1, 4])
def test_each_row_is_asked_about_and_its_number_read(tmp_path, concurrency):
    with serve(by_row) as stub:
        assert judged(stub.url, tmp_path, concurrency=concurrency) == [1.0, 2.0, 3.0]  # "say" has an a too
    asked = sorted(stub.requests, key=lambda request: request["messages"][0]["content"])
    assert asked[1] == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Q: say {response} A: a R: 1 {other}"}],
    }


def test_a_template_is_filled_once():
    row = {"prompt": "{response}", "response": "{ground_truth} {x}", "ground_truth": None}
    assert (
        filled("{prompt}|{response}|{ground_truth}|{{prompt}}", row)
        == "{response}|{ground_truth} {x}|null|{{response}}"
    )
    assert filled("{ground_truth}", {**row, "ground_truth": "é"}) == "é"
    assert filled("{ground_truth}", {**row, "ground_truth": {"é": 1}}) == '{"é": 1}'


@pytest.mark.parametrize(
    "answer, words",
    [
        (completion("I would say seven"), "the reply does not match"),
        (completion("Score: 11"), "11 in the reply is not from 0 to 10"),
        (completion("Score: -1"), "-1 in the reply is not from 0 to 10"),
        (completion("Score: NaN"), "nan in the reply is not from 0 to 10"),
        (completion("Score: 1.2.3"), "'1.2.3' in the reply is not a number"),
        (completion(""), "the reply does not match"),
        (completion(None), "expected a chat completion"),
        ({"choices": []}, "expected a chat completion"),
        ({"error": "model m does not exist"}, "model m does not exist"),
        ([], "expected a chat completion"),
        (b"nope", "not JSON"),
    ],
)
def test_a_reply_out_of_format_is_asked_for_again_and_then_named_with_its_row(tmp_path, answer, words):
    with serve(lambda number, content: (200, answer) if number else by_row(number, content)) as stub:
        with pytest.raises(RewardError) as caught:
            judged(stub.url, tmp_path)
    assert len(stub.requests) == 1 + 3
    assert str(caught.value).startswith(f"{WHERE}, sample 1-p1-0: ") and words in str(caught.value)


def test_a_judge_that_follows_its_format_in_the_end_is_heard(tmp_path):
    with serve(lambda number, content: by_row(number, content) if number % 3 == 2 else (200, completion("hm"))) as stub:
        assert judged(stub.url, tmp_path) == [1.0, 2.0, 3.0]
    assert len(stub.requests) == 9


def test_a_judge_that_says_nan_is_heard_where_such_rows_are_dropped(tmp_path):
    with serve(lambda number, content: (200, completion("Score: NaN"))) as stub:
        assert np.isnan(judged(stub.url, tmp_path, nonfinite="drop")).all()
        assert len(stub.requests) == 3
    with serve(lambda number, content: (200, completion("NaN"))) as stub:  # out of format, which is another thing
        with pytest.raises(RewardError, match="the reply does not match"):
            judged(stub.url, tmp_path / "other", nonfinite="drop")


def test_of_rows_asked_about_together_those_that_were_scored_are_kept(tmp_path):
    def all_but_one(number, content):
        return (200, completion("hm")) if "R: 1" in content["messages"][0]["content"] else by_row(number, content)

    with serve(all_but_one) as stub:
        with pytest.raises(RewardError, match="sample 1-p1-0"):
            judged(stub.url, tmp_path, concurrency=3)
    with serve(by_row) as stub:
        assert judged(stub.url, tmp_path, concurrency=3) == [1.0, 2.0, 3.0]
    assert len(stub.requests) == 1
