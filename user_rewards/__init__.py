"""Reward functions of your own. `function: "example:mentions_the_question"` is one of example.py (docs/rewards.md)."""
