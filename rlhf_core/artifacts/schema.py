"""One Arrow schema per artifact: the only place that names columns.

Ragged data stays ragged: no padding and no sentinels on disk. Within a row of rollouts and everything appended to it,
all response-aligned lists have the length of `response_ids`. A zero-length response is a legal row ([] everywhere).
Bump SCHEMA_VERSION when a column changes its name, type or meaning.
"""

from collections.abc import Collection

import pyarrow as pa

SCHEMA_VERSION = 3

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())

PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),  # unique
        ("messages", _MESSAGES),  # null for a raw-text prompt
        ("prompt", pa.string()),  # rendered with the chat template
        ("prompt_ids", _IDS),  # what is sent to the model, BOS and template included
        ("ground_truth", pa.string()),  # JSON, for verifiable rewards; null otherwise
        ("source", pa.string()),  # file or dataset the row came from
        ("split", pa.string()),  # train | eval
    ]
)

PREFERENCES = pa.schema(
    [
        ("pair_id", pa.string()),  # unique
        ("messages", _MESSAGES),  # the shared prompt; null for raw text
        ("prompt", pa.string()),  # rendered
        ("prompt_ids", _IDS),
        ("responses", pa.list_(pa.string())),  # two or more
        ("response_ids", pa.list_(_IDS)),  # one list per response, closed by an EOS id unless cut at max_pair_tokens
        ("ranks", _IDS),  # one per response, 0 = best, ties allowed
        ("margin", pa.float32()),  # label strength in the labeller's units; null if unknown
        ("agreement", pa.float32()),  # of a pair: share of annotators who prefer the better one; null if unknown
        ("source", pa.string()),
        ("split", pa.string()),  # train | eval
    ]
)

ROLLOUTS = pa.schema(
    [
        ("sample_id", pa.string()),  # "<iteration>-<prompt_id>-<sample_index>", unique
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),  # 0 .. samples_per_prompt - 1
        ("prompt", pa.string()),
        ("prompt_ids", _IDS),
        ("response", pa.string()),  # response_ids decoded, special tokens left out; the policy never reads it again
        ("response_ids", _IDS),  # [T], the EOS included when it was sampled
        ("sampler_logprobs", _FLOATS),  # [T], nats, log p of each sampled token at the sampling temperature, by vLLM
        ("finish_reason", pa.string()),  # stop (the model ended the response) | length (cut off)
        ("ground_truth", pa.string()),
    ]
)

_LOGPROBS = [
    (
        "logprobs",
        _FLOATS,
    ),  # [T], nats, the same tokens under the trainer's forward pass of the policy before the update
    ("ref_logprobs", _FLOATS),  # [T], nats, under the reference model
]

# Only with score.full_kl.
_FULL_KL = [("full_kl", _FLOATS)]  # [T], nats, KL(policy || reference) over the whole vocabulary, at the sampled state

# Only with a critic.
_VALUES = [
    ("values", _FLOATS),  # [T], V of the state before each token, reward units
    ("bootstrap_value", pa.float32()),  # V of the state after the last token, reward units
]

_ADVANTAGES = [
    ("importance_weights", _FLOATS),  # [T], policy before the update / sampler, bounded or 0 by advantages.correction
    ("rewards", _FLOATS),  # [T], -kl_coef * KL, plus the final score at the last token; scaled when whiten_rewards
    ("advantages", _FLOATS),  # [T], whitened when whiten_advantages
]

# Only with a critic.
_RETURNS = [
    ("returns", _FLOATS),  # [T], what the critic learns: advantages before whitening plus values
    ("bootstrap_return", pa.float32()),  # the same after the last token, where conventions put the score there; or null
]

# Response-aligned list columns: all have the length of response_ids within a row.
ALIGNED = (
    "sampler_logprobs",
    "logprobs",
    "ref_logprobs",
    "full_kl",
    "values",
    "importance_weights",
    "rewards",
    "advantages",
    "returns",
)

# Columns in which a null says "unknown" or "none". Everywhere else a null, at any depth, is refused.
NULLABLE = ("messages", "ground_truth", "margin", "agreement", "reward_model_score", "bootstrap_return")


def score_column(source: str) -> str:
    """Name of the column that holds one reward source's score."""
    return f"score_{source}"


def outcome_column(source: str) -> str:
    """Name of the column that says how a source that runs programs ended on a row."""
    return f"outcome_{source}"


def scores_schema(
    sources: list[str], *, critic: bool = True, full_kl: bool = False, outcomes: Collection[str] = ()
) -> pa.Schema:
    """Schema of data/scores: rollouts, the forward passes, one column per reward source, and their weighted sum.

    Args:
        sources: Reward sources, in order.
        outcomes: Those of them that also have a column of outcomes, which follows their scores.
        critic: Whether there are values.
        full_kl: Whether there is the full-vocabulary KL.
    """
    passes = [*_LOGPROBS, *(_FULL_KL if full_kl else []), *(_VALUES if critic else [])]
    return pa.schema([*ROLLOUTS, *(pa.field(*field) for field in [*passes, *_source_columns(sources, outcomes)])])


def advantages_schema(scores: pa.Schema) -> pa.Schema:
    """Schema of data/advantages: everything in data/scores, the advantages, and returns where there are values."""
    extra = [*_ADVANTAGES, *(_RETURNS if "values" in scores.names else [])]
    return pa.schema([*scores.remove_metadata(), *(pa.field(*field) for field in extra)])


def evaluations_schema(sources: list[str], *, outcomes: Collection[str] = ()) -> pa.Schema:
    """Schema of data/evaluations: rollouts, logprobs under the evaluated policy and the reference, and the scores.

    Args:
        sources: Sources of evaluate.rewards, in order. Their weighted sum, score, is what policies are compared by.
        outcomes: As for scores_schema.
    """
    reward_model = ("reward_model_score", pa.float32())  # the trained reward model, which PPO climbs; null without one
    extra = [*_LOGPROBS, *_source_columns(sources, outcomes), reward_model]
    return pa.schema([*ROLLOUTS, *(pa.field(*field) for field in extra)])


def _source_columns(sources: list[str], outcomes: Collection[str]) -> list[tuple[str, pa.DataType]]:
    """One column per reward source, its outcomes if it has any, and the weighted sum of all."""
    columns: list[tuple[str, pa.DataType]] = []
    for name in sources:
        columns.append((score_column(name), pa.float32()))
        if name in outcomes:
            columns.append((outcome_column(name), pa.string()))
    return [*columns, ("score", pa.float32())]


def declared_types(names: list[str]) -> dict[str, pa.DataType]:
    """Return the Arrow types that this module declares for a file with these columns, by column name.

    Args:
        names: All column names of the file, in order; the first one (the row key) tells the artifact apart.

    Returns:
        Types of the columns that are declared here; empty when the key is none of ours.
    """
    if not names or names[0] not in _BY_KEY:
        return {}
    known = {field.name: field.type for schema in _BY_KEY[names[0]] for field in schema}
    scores = {name: pa.float32() for name in names if name.startswith(score_column("")) or name == "score"}
    outcomes = {name: pa.string() for name in names if name.startswith(outcome_column(""))}
    return {name: kind for name, kind in {**scores, **outcomes, **known}.items() if name in names}


# Everything that one kind of row may hold, by the row key that tells the kinds apart.
_BY_KEY = {
    "prompt_id": [PROMPTS],
    "pair_id": [PREFERENCES],
    "sample_id": [
        evaluations_schema([]),
        pa.schema([pa.field(*field) for field in [*_LOGPROBS, *_FULL_KL, *_VALUES, *_ADVANTAGES, *_RETURNS]]),
    ],
}
