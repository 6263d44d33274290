"""One Arrow schema per artifact: the only place that names columns.

Ragged data stays ragged: no padding and no sentinels on disk. Within a row of rollouts and everything appended to it,
all response-aligned lists have the length of `response_ids`. A zero-length response is a legal row ([] everywhere).
Bump SCHEMA_VERSION when a column changes its name, type or meaning.
"""

import pyarrow as pa

SCHEMA_VERSION = 1

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
        ("response", pa.string()),  # response_ids decoded, special tokens left out; for reading, never re-tokenised
        ("response_ids", _IDS),  # [T], the EOS included when it was sampled
        ("sampler_logprobs", _FLOATS),  # [T], nats, log p of each sampled token at the sampling temperature, by vLLM
        ("finish_reason", pa.string()),  # stop (the model ended the response) | length (cut off)
        ("ground_truth", pa.string()),
    ]
)

_SCORED = [
    ("logprobs", _FLOATS),  # [T], nats, the same tokens under the trainer's forward pass of the same policy
    ("ref_logprobs", _FLOATS),  # [T], nats, under the reference model
    ("values", _FLOATS),  # [T], V of the state before each token, reward units
]

_ADVANTAGES = [
    ("rewards", _FLOATS),  # [T], -kl_coef * KL, plus the score at the last token; scaled when whiten_rewards
    ("advantages", _FLOATS),  # [T], whitened when whiten_advantages
    ("returns", _FLOATS),  # [T], advantages before whitening plus values
]

# Response-aligned list columns: all have the length of response_ids within a row.
ALIGNED = ("sampler_logprobs", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")

# Columns in which a null says "unknown". Everywhere else a null, at any depth, is refused.
NULLABLE = ("messages", "ground_truth", "margin", "score_reward_model")


def score_column(source: str) -> str:
    """Name of the column that holds one reward source's score."""
    return f"score_{source}"


def scores_schema(sources: list[str]) -> pa.Schema:
    """Schema of data/scores: rollouts, the forward passes, one column per reward source, and their weighted sum."""
    extra = [*_SCORED, *((score_column(name), pa.float32()) for name in sources), ("score", pa.float32())]
    return pa.schema([*ROLLOUTS, *(pa.field(*field) for field in extra)])


def advantages_schema(scores: pa.Schema) -> pa.Schema:
    """Schema of data/advantages: everything in data/scores and three columns more."""
    return pa.schema([*scores.remove_metadata(), *(pa.field(*field) for field in _ADVANTAGES)])


EVALUATIONS = pa.schema(
    [
        *ROLLOUTS,
        pa.field("logprobs", _FLOATS),  # [T], nats, under the evaluated policy
        pa.field("ref_logprobs", _FLOATS),  # [T], nats, under the reference model
        pa.field("score_judge", pa.float32()),  # the true reward: the demo's judge
        pa.field("score_reward_model", pa.float32()),  # the proxy: the reward model
    ]
)


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
    return {name: kind for name, kind in {**scores, **known}.items() if name in names}


# Everything that one kind of row may hold, by the row key that tells the kinds apart.
_BY_KEY = {
    "prompt_id": [PROMPTS],
    "pair_id": [PREFERENCES],
    "sample_id": [EVALUATIONS, pa.schema([pa.field(*field) for field in [*_SCORED, *_ADVANTAGES]])],
}
