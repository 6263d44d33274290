"""A language model as judge, behind any OpenAI-compatible endpoint: it is asked for a number about each response."""

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import AnswerError, RewardError
from rlhf_core.reward.rows import Row
from rlhf_core.reward.service import Service, keep_scores, kept_scores, shown

_PLACE = re.compile(r"\{(prompt|response|ground_truth)\}")


def judge_scores(
    service: Service,
    rows: list[Row],
    kept: Path,
    where: str,
    *,
    request: dict[str, Any],
    template: str,
    read: Callable[[Any], float],
    concurrency: int,
    nonfinite: Literal["error", "drop"],
) -> list[float]:
    """Return a judge's score of every row; each is kept as soon as it is there.

    Args:
        service: From open_service, at .../chat/completions.
        rows: Of one shard.
        kept: File of what was scored before, which is not asked for again.
        where: Names source and shard.
        request: Model, temperature and the like.
        template: Of the message, see filled.
        read: From reply_reader.
        concurrency: Requests at the same time.
        nonfinite: As checked_scores.

    Raises:
        RewardError: If a row has no score after all tries. Of rows asked for at the same time the others are kept.
    """
    scores = kept_scores(kept, nonfinite=nonfinite)
    waiting = [row for row in rows if row["sample_id"] not in scores]

    def ask(row: Row) -> float | RewardError:
        payload = {**request, "messages": [{"role": "user", "content": filled(template, row)}]}
        try:
            return service.ask(payload, read, f"{where}, sample {row['sample_id']}")
        except RewardError as error:
            return error

    with ThreadPoolExecutor(concurrency) as pool:
        for start in range(0, len(waiting), concurrency):
            batch = waiting[start : start + concurrency]
            found = dict(zip((row["sample_id"] for row in batch), pool.map(ask, batch), strict=True))
            scored = {sample_id: score for sample_id, score in found.items() if not isinstance(score, RewardError)}
            keep_scores(kept, scored)
            for failure in found.values():
                if isinstance(failure, RewardError):
                    raise failure
            scores |= scored
    return [scores[row["sample_id"]] for row in rows]


def filled(template: str, row: Row) -> str:
    """Return a template with {prompt}, {response} and {ground_truth} replaced, once each; other braces stay.

    Args:
        template: Of a message.
        row: As sources see it. A ground truth that is not text is put in as JSON.
    """
    truth = row["ground_truth"]
    texts = {**row, "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)}
    return _PLACE.sub(lambda found: texts[found[1]], template)


def reply_reader(
    pattern: str, min_score: float, max_score: float, *, nonfinite: Literal["error", "drop"]
) -> Callable[[Any], float]:
    """Return the check of a reply: from the parsed answer of the endpoint to the judge's number, or AnswerError.

    Args:
        pattern: Regular expression with one group, searched for in the reply; its first match counts.
        min_score: Lowest number that follows the format.
        max_score: Highest one.
        nonfinite: With drop, NaN or infinity where the number should be is a NaN, not a reply out of format.
    """

    def read(answer: Any) -> float:
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise AnswerError(f"expected a chat completion with text in it, found {shown(json.dumps(answer))}")
        found = re.search(pattern, reply)
        if found is None or found[1] is None:
            raise AnswerError(f"the reply does not match {pattern!r}: {shown(reply)}")
        try:
            score = float(found[1])
        except ValueError:
            raise AnswerError(f"{found[1]!r} in the reply is not a number: {shown(reply)}") from None
        if nonfinite == "drop" and not math.isfinite(score):
            return math.nan
        if not min_score <= score <= max_score:
            raise AnswerError(f"{score:g} in the reply is not from {min_score:g} to {max_score:g}: {shown(reply)}")
        return score

    return read
