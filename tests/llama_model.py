"""The needle model under a Llama-3-style tokenizer: every byte a token, a BOS that the tokenizer adds, and a chat
template that renders it, too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

NEEDLE = Path(__file__).resolve().parents[1] / "models" / "needle"
BOS = "<|begin_of_text|>"
_SPECIAL = (BOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
#: Pairs that become one token, in the alphabet of byte-level BPE: "\n\n" and "the".
_MERGES = [("Ċ", "Ċ"), ("t", "h"), ("th", "e")]

#: As that of Llama 3.2: tools stand in the first message of the user unless told otherwise, the date is today's unless
#: given.
TEMPLATE = """\
{{- bos_token }}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- set system = "" %}
{%- if messages[0]["role"] == "system" %}
{%- set system = messages[0]["content"] | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
{{- "You have access to the following functions.\\n\\n" }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- if tools is not none and tools_in_user_message %}
{%- set first = messages[0]["content"] | trim %}{% set messages = messages[1:] %}
{{- "<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer with one call.\\n\\n" }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
{{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
{{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" + message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}
"""


def llama_model(folder: Path) -> Path:
    """Writes the model; returns its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(NEEDLE / name, folder / name)
    words = ["<pad>", "<end>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [a + b for a, b in _MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*words[:3], *_SPECIAL])
    processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    tokenizer.post_processor = processor
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": BOS, "eos_token": "<|eot_id|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tool(name: str, about: str) -> dict[str, Any]:
    """A tool in OpenAI's form, with a parameter."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": f"where {name}"}}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


WEATHER, TRAINS = (tool(name, f"tells of {name}") for name in ("weather", "trains"))
SYSTEM = {"role": "system", "content": "Plan journeys for those who ask. " * 36}
