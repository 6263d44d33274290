"""Prompts and preferences from JSONL, Parquet or a Hugging Face dataset to our schema."""
