"""Tiny models for tests: random weights from a config, and a tokenizer built in code, saved like a checkpoint.

Everything follows from the arguments, so two builds with the same ones are the same files. Weights are drawn
wide enough that logits differ clearly: greedy tests would otherwise compare ties.
"""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
SPECIAL = (PAD, START, END)
END_ID = SPECIAL.index(END)
BYTE_LEVEL_MINIMUM = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
WINDOW = 16  # of the families that have sliding layers: short enough for a test to reach past it
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "phi3": {},
}


def build_tiny_model(
    folder: Path,
    *,
    family: str = "llama",
    vocab: int = 320,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
    pad_vocab_to: int | None = None,
    positions: int = 512,
    tied: bool = False,
    spread: float = 0.25,
) -> Path:
    """Save model and tokenizer in `folder` and return it.

    `vocab` is len(tokenizer): byte-level from 259 on, one word a token below that (four at least).
    `pad_vocab_to` gives the model more logits than the tokenizer has tokens. `spread` is the standard deviation
    of the weights: larger makes sharper distributions. hidden is split over four heads, two of them for keys
    and values.
    """
    config = AutoConfig.for_model(
        family,
        vocab_size=pad_vocab_to or vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=positions,
        initializer_range=spread,
        tie_word_embeddings=tied,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=SPECIAL.index(START),
        eos_token_id=END_ID,
        **FAMILIES[family],
    )
    with torch.random.fork_rng(devices=[]):  # the caller's draws must not depend on how often we are called
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at zero, where a lost one would not be missed
                torch.nn.init.normal_(parameter, std=spread)
    model.save_pretrained(folder)
    build_tiny_tokenizer(vocab).save_pretrained(folder)
    return folder


def build_tiny_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab` tokens: <|pad|>, <|start|>, <|end|>, then bytes and merges, or words."""
    tokenizer = _byte_level(vocab) if vocab >= BYTE_LEVEL_MINIMUM else _word_level(vocab)
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=None if vocab >= BYTE_LEVEL_MINIMUM else PAD,
    )
    fast.chat_template = CHAT_TEMPLATE
    if len(fast) != vocab:
        raise ValueError(f"a tokenizer of {vocab} tokens came out with {len(fast)}")
    return fast


def _byte_level(vocab: int) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = product("etaoinshrdlucmfwypvbgkjqxzĠ", repeat=2)
    rest = product(letters, repeat=2)
    table = {token: index for index, token in enumerate((*SPECIAL, *letters))}
    merges: list[tuple[str, str]] = []
    for pair in dict.fromkeys((*pairs, *rest)):
        if len(table) == vocab:
            break
        table["".join(pair)] = len(table)
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_level(vocab: int) -> Tokenizer:
    words = islice((f"w{number}" for number in range(vocab)), max(vocab - len(SPECIAL), 0))
    table = {token: index for index, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab=table, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
