"""A tokenizer for dummy models: every token is a word, every id has one.

`bench_serving` sends text that it decodes from random ids, and counts a token when text comes back. With this tokenizer
every text has as many tokens after encoding as it was made of, and every token that a dummy model samples is text.
"""

from __future__ import annotations

import json
import string
from functools import cache
from itertools import chain, islice, product
from pathlib import Path

#: Contents alone, in their order. Roles would be tokens that no row could tell from a prompt's.
_CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


@cache
def words(count: int) -> tuple[str, ...]:
    """`count` different words of letters and digits, the shortest first; a word's place is its token id."""
    letters = string.digits + string.ascii_letters
    longer = (map("".join, product(letters, repeat=length)) for length in range(1, 5))
    return tuple(islice(chain.from_iterable(longer), count))


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """`tokenizer.json` and `tokenizer_config.json` with ids 0 to `vocab` - 1, no special tokens; words are parted by
    white space. The chat template joins the contents of all messages.
    """
    model = {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(words(vocab))}, "unk_token": "0"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": 1 << 20, "chat_template": _CHAT}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
