"""A tiny random Llama with a byte-level tokenizer: real code paths in milliseconds, no download.

head_dim is 32 because vLLM's CPU attention refuses less.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]  # ids 0..4
MERGES = [("a", "b"), ("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 266 ids: 0..4 special, then the bytes, then ab, he, llo, hello, ll."""
    vocab = {token: index for index, token in enumerate(SPECIAL)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    for merged in ["ab", "he", "llo", "hello", "ll"]:
        vocab[merged] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[3:],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(seed: int = 0, *, vocab_size: int = 266) -> LlamaForCausalLM:
    """Two layers, two heads of 32; weights large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float()


def save_tiny(directory: str | Path, seed: int = 0) -> Path:
    """Write model and tokenizer as a Hugging Face directory and return it."""
    directory = Path(directory)
    model = tiny_model(seed)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 4], pad_token_id=0)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
