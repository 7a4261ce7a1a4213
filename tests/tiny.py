"""A tiny policy for tests: a random Llama of 2 layers and a byte-level BPE tokenizer, as an ordinary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGS = ("mem", "think", "search", "answer", "information")
TEXT = (
    "What is the capital of France? The capital of France is Paris. The currency of Japan is Yen. ",
    "I have sufficient information to provide the final answers. I need to search for the country of Ulm. ",
    "You are a helpful assistant. user system assistant. 0 1 2 3 4 5 6 7 8 9; unknown; Kathryn Bigelow. ",
)


def make_tokenizer(vocab_size: int = 512, *, pad: str = "<|endoftext|>", tags: bool = True) -> Any:
    """Byte-level BPE with ChatML; the tags are added special tokens unless ``tags`` is false."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if tags:
        specials += [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text * 4 for text in TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token=pad, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_policy(folder: Path, tokenizer: Any, *, seed: int = 0, window: int = 512, **sizes: Any) -> Path:
    """A random Llama (width 32, 2 layers, 4 heads, 2 key-value heads) over ``tokenizer``, saved to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,  # large enough that the next-token distribution is far from uniform
        "tie_word_embeddings": True,
        "attention_bias": True,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=window,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **(shape | sizes),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
