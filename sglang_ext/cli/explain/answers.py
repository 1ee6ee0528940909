"""Where `explain` has its answer from: a running server, or the store and the settings of one."""

from __future__ import annotations

import argparse
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_ext.cli.asking import ask, request
from sglang_ext.cli.checks import preview_server
from sglang_ext.cli.explain.picture import draw_attended, read_attended
from sglang_ext.compat.engine import salt_refusal, unknown_ids
from sglang_ext.prefill.prompt_tokens import request_tokens
from sglang_ext.prefill.prompts import Prompt, PromptError, check_prompt
from sglang_ext.prefix.explanation import explain_prompt

_SECONDS = 600.0
_TOKENS = 16
"""Decode steps of the request that is drawn, plus one."""
_ATTEMPTS = 3
"""Requests, at most: the first ones may decode while their index is loading."""


def read_prompt(args: argparse.Namespace) -> Prompt:
    """What --prompt or --messages say, with the namespace. Raises ValueError."""
    try:
        if args.prompt is not None:
            if os.path.isfile(args.prompt):
                raise PromptError(f"--prompt: expected a text, or @ and a file, got a file's name; say @{args.prompt}")
            named = args.prompt.startswith("@")
            given: Any = {"text": Path(args.prompt[1:]).read_bytes().decode("utf-8-sig") if named else args.prompt}
        else:
            given = json.loads(Path(args.messages).read_bytes())
            given = {"messages": given} if isinstance(given, list) else given
        own = {"extra_key": args.extra_key, "cache_salt": args.cache_salt}
        prompt = msgspec.convert({**given, **{name: one for name, one in own.items() if one is not None}}, Prompt)
        check_prompt(prompt, args.messages or "--prompt")
    except PromptError:
        raise  # says all itself
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a file that can be read, got: {error}; correct the path") from error
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'expected messages such as [{{"role": "user", "content": "..."}}], or an object with them; got: {error}'
        ) from error
    return prompt


def compare_here(args: argparse.Namespace, prompt: Prompt) -> dict[str, Any]:
    """By the settings of a server that need not run.

    Raises:
        EngineStartError, IndexStoreError, OSError, ValueError: the settings, the store or the prompt cannot be used.
    """
    preview = preview_server(args)
    settings, source = preview.settings, preview.tokens
    assert settings is not None, "--sparse-attn is among the flags"
    ids = request_tokens(prompt, source)
    if refusal := unknown_ids(ids, preview.vocab_size) or salt_refusal(prompt.cache_salt):
        raise ValueError(refusal)
    namespace = {"extra_key": prompt.extra_key, "cache_salt": prompt.cache_salt}
    return {"compared": msgspec.to_builtins(explain_prompt(settings, preview.model(), ids, namespace, source.text))}


def ask_server(args: argparse.Namespace, prompt: Prompt) -> dict[str, Any]:
    """What a running server says. Raises ServerError."""
    named = {name: value for name, value in msgspec.structs.asdict(prompt).items() if value not in (None, "")}
    return ask(args, "explain", named, _SECONDS)


def draw(args: argparse.Namespace, prompt: Prompt, found: Mapping[str, Any]) -> None:
    """Send requests of the prompt that the server traces, and draw what they attended."""
    folder = found["trace_folder"]
    if folder is None:
        raise ValueError(
            "expected a server that traces, for --picture; this one does not. Start it with "
            '"trace_folder": "FOLDER" in --sparse-attn-config: steps of requests \'trace-...\' are slower then'
        )
    sender = argparse.Namespace(url=args.url, admin_key=args.api_key or args.admin_key)
    meta: Mapping[str, Any] = {}
    for _ in range(_ATTEMPTS):
        rid = f"trace-explain-{uuid.uuid4().hex[:12]}"
        sampling = {"temperature": 0.0, "max_new_tokens": _TOKENS, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": found["input_ids"], "rid": rid, "sampling_params": sampling}
        keys = {"extra_key": prompt.extra_key, "cache_salt": prompt.cache_salt}
        body |= {name: value for name, value in keys.items() if value is not None}
        try:
            meta = request(sender, "/generate", body, _SECONDS)["meta_info"]
            attended = read_attended(Path(folder), rid)
            if attended:
                return draw_attended(attended, Path(args.picture))
        except OSError as error:
            todo = "run this on the server's host, as its user, and name a file that can be written"
            raise ValueError(
                f"expected to read traces in {folder} and write the picture, got: {error}; {todo}"
            ) from error
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"expected matplotlib and a picture's name, got: {error}; pip install 'sglang-ext[calibrate]', or "
                "correct --picture"
            ) from error
    said = json.dumps(meta.get("sparse_attn", meta))[:500]
    raise ValueError(f"expected a step by an index to draw, got none; the response says {said}")
