"""A tiny random BERT with a WordPiece tokenizer: no decoder, no chat template, and other ids than tests/tiny.py."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0..4
WORDS = ["hello", "##ab", "good", "bad", "user", "assistant"]


def encoder_tokenizer(max_length: int = 32) -> PreTrainedTokenizerFast:
    """WordPiece: 0..4 special, letters, letters inside words, punctuation, WORDS. A pair is [CLS] a [SEP] b [SEP]."""
    letters = list(string.ascii_lowercase)
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *"[]:.", *WORDS]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_max_length=max_length,
    )


def save_encoder(directory: Path, *, classifier: bool = False, labels: int = 1, max_length: int = 32) -> Path:
    """Write model and tokenizer: a masked language model without a score head, or a classifier."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(encoder_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_labels=labels,
    )
    model = BertForSequenceClassification(config) if classifier else BertForMaskedLM(config)
    model.float().save_pretrained(directory)
    encoder_tokenizer(max_length).save_pretrained(directory)
    return directory
