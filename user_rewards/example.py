"""An example of a reward function: copy it, change it, name it in params.yaml. A change here reruns `score`."""

import re
from typing import Any


def mentions_the_question(rows: list[dict[str, Any]]) -> list[float]:
    """Return, for each row, the share of the prompt's words of five letters or more that the response has too.

    In params.yaml:

        rewards:
          on_topic: {kind: python, weight: 0.5, function: "example:mentions_the_question"}

    Args:
        rows: One dict for each response: sample_id, prompt, response, prompt_ids, response_ids, ground_truth (the
            parsed JSON value, or None) and finish_reason ("stop" or "length").

    Returns:
        One finite number for each row, in their order; here in [0, 1], 0 for a prompt without such words.
    """
    scores = []
    for row in rows:
        asked, answered = (set(re.findall(r"[a-z]{5,}", row[key].lower())) for key in ("prompt", "response"))
        scores.append(len(asked & answered) / len(asked) if asked else 0.0)
    return scores
