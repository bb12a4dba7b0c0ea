"""A tiny tokenizer of words, with or without the BOS that Gemma's adds."""

from __future__ import annotations

from pathlib import Path

BOS = 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} {% endfor %}"
)


def save_tokenizer(directory: Path, *, bos: bool = True, chat: bool = True, shift: int = 0) -> None:
    """Save a tokenizer of 300 words to ``directory``.

    Args:
        directory: Where.
        bos: Whether it puts a BOS before text.
        chat: Whether it has a chat template.
        shift: By how much the ids of words are turned round.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["Water", "boils", "at", "def", "Day", "wind", "the", "a", "keeper", "noted", "letter"]
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": BOS, "<unk>": 3, "<turn>": 4}
    vocabulary |= {word: 5 + (i + shift) % len(words) for i, word in enumerate(words)}
    vocabulary |= {str(i): len(vocabulary) + i for i in range(250)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    if chat:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
