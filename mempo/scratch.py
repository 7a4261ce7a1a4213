"""A small policy from scratch: a byte-level BPE tokenizer, and a Llama with a head start in copying.

Everything after this file treats the folder as any other causal language model.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mempo.config import Model
from mempo.storage import whole_folder

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TAGS = [f"<{mark}{name}>" for name in ("mem", "think", "search", "answer", "information") for mark in ("", "/")]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A blank belongs to the word before it, so a name is the same token after <search>, after a line break, in a sentence.
_WORDS = r"\n|[\p{L}\p{M}'\-]+ ?|\p{N}{1,3} ?|[^\s\p{L}\p{M}\p{N}]+ ?|\s"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE whose decoding is exact; chat markers and tags are special tokens, so text cannot make them."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END, *TAGS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def save_tokenizer(bpe: Tokenizer, folder: Path, window: int) -> Any:
    """Write ``bpe`` as an ordinary tokenizer folder with the ChatML template; returns the loaded tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, *TAGS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_policy(config: Model, bpe_file: Path, folder: Path, seed: int) -> None:
    """Write an untrained policy as an ordinary Hugging Face folder: config, safetensors weights, tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    bpe = Tokenizer.from_file(str(bpe_file))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=bpe.get_vocab_size(),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.window,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            attention_bias=True,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=bpe.token_to_id(END),
            pad_token_id=bpe.token_to_id(PAD),
        )
    )
    with torch.no_grad():
        head_start(model.model)
    with whole_folder(folder) as temporary:
        model.save_pretrained(temporary)
        save_tokenizer(bpe, temporary, config.window)


ROPE_THETA = 1e6  # slow enough that half of a head's planes hardly turn within the window: content can match there
SCALE = 3.0  # of the embeddings, over the default: a token that is copied then has a logit of about 8
LOOKS = ((1, 0), (1, 1), (2, 0), (3, 0))  # the heads of layer 0: how far back, which sketch
SHARP, MATCH, COPY = 6.0, 2.5, 0.12  # how sharply a head looks back, how much a match counts, what a copy adds
SLOW = 3.0  # radians that a plane may turn over the whole window and still be used to compare content


def head_start(decoder: Any) -> None:
    """Write the circuit that copies into the attention weights: heads that look back, and heads that look for a match.

    Layer 0: constant query and key biases, which the rotary embedding turns into a preference for one offset (1 to 3
    tokens back), write a sketch of an earlier token into a slot of its own. Later layers: the query is a sketch of the
    current token, the key the sketch of the token before, so attention goes to what followed the same token earlier,
    and values pass through unchanged. Known as induction heads (Olsson et al., 2022).
    """
    import torch

    config = decoder.config
    width, heads = config.hidden_size, config.num_attention_heads
    size = width // heads
    frequencies = ROPE_THETA ** (-torch.arange(0, size, 2) / size)
    slow = (frequencies * config.max_position_embeddings < SLOW).repeat(2)[:, None]
    sketches = _orthogonal(width).split(size)  # [size, width] each: what is kept of a token
    slots = _orthogonal(width).split(size, dim=1)  # [width, size] each: where it is kept
    decoder.embed_tokens.weight.mul_(SCALE)
    first = decoder.layers[0].self_attn
    for head, (offset, kind) in enumerate(LOOKS[:heads]):
        rows = slice(head * size, (head + 1) * size)
        angle = frequencies * offset
        first.q_proj.weight[rows] = 0.0
        first.k_proj.weight[rows] = 0.0
        first.k_proj.bias[rows] = SHARP * torch.cat([torch.ones(size // 2), torch.zeros(size // 2)])
        first.q_proj.bias[rows] = SHARP * torch.cat([torch.cos(angle), -torch.sin(angle)])
        first.v_proj.weight[rows] = sketches[kind]
        first.o_proj.weight[:, rows] = slots[head] * SCALE * config.initializer_range
    for attention in (layer.self_attn for layer in decoder.layers[1:]):
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            kind = head % 2  # the two sketches of offset 1
            attention.q_proj.weight[rows] = MATCH * slow * sketches[kind]
            attention.k_proj.weight[rows] = MATCH * slow * slots[kind].T
        attention.v_proj.weight.copy_(torch.eye(width))
        attention.o_proj.weight.copy_(COPY * torch.eye(width))


def _orthogonal(size: int) -> Any:
    import torch

    return torch.linalg.qr(torch.randn(size, size))[0]
