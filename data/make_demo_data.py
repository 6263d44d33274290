"""Make the demo's own data, data/raw/prompts.jsonl and data/raw/preferences.jsonl. Both are in git; no run needs this.

    python -m data.make_demo_data prompts        # a second, no model
    python -m data.make_demo_data preferences    # a few minutes on two cores; needs data/checkpoints/policy/0

Recipe, seed 0:
- Prompts: 80 topics and 12 templates, all written for this project. Each topic gets 6 templates. The last 8 topics are
  held out whole; of the other 432 prompts 48 are held out too. That makes 384 prompts to train on and 96 to evaluate.
- Preferences: 8 responses to every prompt from the base model (SmolLM2-135M-Instruct), sampled by vLLM in float32 at
  temperature 0.7, at most 40 tokens, in chunks of 32 prompts that have a seed each. rlhf_core.reward.judge labels them:
  VADER's compound score, minus 1 for a response that is not a finished sentence. For every prompt the best response is
  paired with the worst, and the second best with the second worst, wherever the two differ by 0.2 or more; the
  difference is the margin. A pair is held out when its prompt is.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

SEED = 0
PROMPTS = Path("data/raw/prompts.jsonl")
PREFERENCES = Path("data/raw/preferences.jsonl")
POLICY = Path("data/checkpoints/policy/0")

TEMPLATES_PER_TOPIC = 6
EVAL_TOPICS = 8
EVAL_PROMPTS_OF_TRAIN_TOPICS = 48

RESPONSES_PER_PROMPT = 8
PAIRS_PER_PROMPT = 2
LEAST_MARGIN = 0.2
CHUNK_PROMPTS = 32
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 40

TEMPLATES = (
    "Write one short sentence about {}.",
    "Describe {} in one sentence.",
    "Tell me one thing about {}.",
    "What is {} like? Answer in one sentence.",
    "In one short sentence, sum up {}.",
    "Write a short caption for a photo of {}.",
    "Write one sentence for a diary about {}.",
    "Write one sentence to a friend about {}.",
    "What do people say about {}? One sentence, please.",
    "Explain {} to a child in one sentence.",
    "Share a short thought about {}.",
    "Write the first sentence of a story about {}.",
)

TOPICS = (
    # weather and seasons
    "a rainy morning",
    "the first snow of the year",
    "a windy afternoon",
    "fog over a harbour",
    "a hot day in the city",
    "a thunderstorm at night",
    "autumn leaves on the pavement",
    "a grey Sunday",
    # home
    "an old kitchen table",
    "a creaking staircase",
    "a leaking tap",
    "a shelf full of books",
    "moving to a new flat",
    "a pile of laundry",
    "a lamp that flickers",
    "the view from a small window",
    # food and drink
    "a cup of tea",
    "burnt toast",
    "a bowl of soup",
    "the village bakery",
    "an empty fridge",
    "a lemon tree",
    "a crowded canteen",
    "homemade bread",
    # travel and traffic
    "a long train ride",
    "a delayed flight",
    "a broken bicycle",
    "a bus stop at dawn",
    "a traffic jam",
    "a ferry across a lake",
    "a map without names",
    "a walk through an old town",
    # work and school
    "the last day of school",
    "a long meeting",
    "a difficult exam",
    "the night shift in a hospital",
    "a lost key card",
    "a new colleague",
    "a job interview",
    "a tidy desk",
    # people
    "a quiet neighbour",
    "a letter from a grandmother",
    "a street musician",
    "a retired sailor",
    "twins who look alike",
    "a busy waiter",
    "a stranger with an umbrella",
    "a family dinner",
    # animals and plants
    "a stray cat",
    "an old dog",
    "a beehive in the garden",
    "a goldfish bowl",
    "crows on a roof",
    "a dry houseplant",
    "a horse in the rain",
    "moss on a stone wall",
    # things and machines
    "a wrist watch that stopped",
    "a red umbrella",
    "a noisy washing machine",
    "a box of old photographs",
    "a forgotten password",
    "a pair of worn shoes",
    "a squeaky door",
    "a chess board",
    # places
    "a lighthouse",
    "an abandoned factory",
    "a mountain hut",
    "a public library",
    "a flea market",
    "a small museum",
    "a bridge over a slow river",
    "a waiting room",
    # held out as a whole
    "a jar of honey",
    "a power cut",
    "a choir rehearsal",
    "a lost suitcase",
    "a tram at midnight",
    "a vegetable garden",
    "a visit to the dentist",
    "a snow globe",
)


def prompt_rows() -> list[dict[str, Any]]:
    """Return the demo's prompts with their split, in the order of the topics."""
    generator = random.Random(SEED)
    rows = [
        {"topic": index, "content": template.format(topic)}
        for index, topic in enumerate(TOPICS)
        for template in sorted(generator.sample(TEMPLATES, TEMPLATES_PER_TOPIC))
    ]
    first_held_out = len(TOPICS) - EVAL_TOPICS
    shared = [index for index, row in enumerate(rows) if row["topic"] < first_held_out]
    held_out = set(generator.sample(shared, EVAL_PROMPTS_OF_TRAIN_TOPICS)) | (set(range(len(rows))) - set(shared))
    return [
        {
            "prompt": [{"role": "user", "content": row["content"]}],
            "split": "eval" if index in held_out else "train",
        }
        for index, row in enumerate(rows)
    ]


def pair_rows(prompt: dict[str, Any], responses: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the preference pairs of one prompt: best against worst, second best against second worst.

    Args:
        prompt: A row of prompt_rows.
        responses: (text, finish_reason) of each response.
    """
    from rlhf_core.reward.judge import judge

    scored = sorted(((judge(text, reason), text) for text, reason in responses), reverse=True)
    rows = []
    for index in range(PAIRS_PER_PROMPT):
        (high, chosen), (low, rejected) = scored[index], scored[-1 - index]
        # An empty text cannot be a response of a pair.
        if high - low >= LEAST_MARGIN and chosen and rejected:
            turns = {
                name: [{"role": "assistant", "content": text}]
                for name, text in (("chosen", chosen), ("rejected", rejected))
            }
            rows.append({**prompt, **turns, "margin": round(high - low, 4)})
    return rows


def sample(prompts: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """Return (text, finish_reason) of the base model's responses to every prompt."""
    from rlhf_core.ingest.chat import prompt_ids
    from rlhf_core.models.tokenizer import eos_ids, load_tokenizer
    from rlhf_core.sampling.engine import Sampler
    from rlhf_core.seeding import derive_seed

    tokenizer = load_tokenizer(POLICY)
    ids = [prompt_ids(tokenizer, row["prompt"], special_tokens_in_text="escape")[1] for row in prompts]
    sampler = Sampler(
        POLICY,
        dtype="float32",
        max_model_len=512,
        kv_cache_gib=1.0,
        gpu_memory_utilization=0.85,
        tensor_parallel_size=1,
        seed=SEED,
    )
    texts = []
    for start in range(0, len(ids), CHUNK_PROMPTS):
        found = sampler.sample(
            ids[start : start + CHUNK_PROMPTS],
            n=RESPONSES_PER_PROMPT,
            temperature=TEMPERATURE,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_ids=eos_ids(POLICY, tokenizer),
            seed=derive_seed(SEED, "demo_data", start),
        )
        for responses in found:
            decoded = [tokenizer.decode(one.response_ids, skip_special_tokens=True).strip() for one in responses]
            texts.append([(text, one.finish_reason) for text, one in zip(decoded, responses, strict=True)])
        print(f"{len(texts)} of {len(ids)} prompts", file=sys.stderr)
    return texts


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows, {path.stat().st_size} bytes", file=sys.stderr)


def main() -> None:
    """Write the file that the command line names."""
    what = sys.argv[1:]
    if what == ["prompts"]:
        write_jsonl(PROMPTS, prompt_rows())
    elif what == ["preferences"]:
        from rlhf_core.sampling.engine import prepare_environment

        prepare_environment()
        prompts = prompt_rows()
        pairs = [
            pair for prompt, found in zip(prompts, sample(prompts), strict=True) for pair in pair_rows(prompt, found)
        ]
        write_jsonl(PREFERENCES, pairs)
    else:
        sys.exit("usage: python -m data.make_demo_data prompts|preferences")


if __name__ == "__main__":
    main()
