"""A reward service: rows go there in batches, scores come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import AnswerError
from rlhf_core.reward.rows import Row, checked_scores
from rlhf_core.reward.service import Service, keep_scores, kept_scores, shown


def service_scores(
    service: Service,
    rows: list[Row],
    kept: Path,
    where: str,
    *,
    batch_size: int,
    nonfinite: Literal["error", "drop"],
) -> list[float]:
    """Return a service's score of every row; each batch is kept as soon as it is scored.

    The request is {"rows": [...]}, a row as docs/rewards.md tells; the answer {"scores": [...]}, one finite number for
    each row, in their order.

    Args:
        service: From open_service.
        rows: Of one shard.
        kept: File of what was scored before, which is not asked for again.
        where: Names source and shard.
        batch_size: Rows of one request.
        nonfinite: As checked_scores.

    Raises:
        RewardError: If the service cannot be used after its retries; with the rows, and the value if one is at fault.
    """
    scores = kept_scores(kept, nonfinite=nonfinite)
    waiting = [row for row in rows if row["sample_id"] not in scores]
    for start in range(0, len(waiting), batch_size):
        batch = waiting[start : start + batch_size]
        ids = [row["sample_id"] for row in batch]
        found = service.ask({"rows": batch}, reader(ids, nonfinite), f"{where}, samples {ids[0]} to {ids[-1]}")
        keep_scores(kept, dict(zip(ids, found, strict=True)))
        scores |= dict(zip(ids, found, strict=True))
    return [scores[row["sample_id"]] for row in rows]


def reader(sample_ids: list[str], nonfinite: Literal["error", "drop"]) -> Callable[[Any], list[float]]:
    """Return the check of an answer: from parsed JSON to one score for each of these rows, or AnswerError."""

    def read(answer: Any) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise AnswerError(f'expected {{"scores": [...]}}, found {shown(repr(answer))}')
        return checked_scores(scores, sample_ids, nonfinite=nonfinite)

    return read
