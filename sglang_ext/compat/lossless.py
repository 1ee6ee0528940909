"""Lossless decode: what it sets on a server's record, and what it does not go with."""

from __future__ import annotations

from typing import Any

from sglang_ext.compat.tensor_parallel import conflict
from sglang_ext.options import Exactness, SparseAttnConfig

NAME = "SPARSE_VERIFY"
"""What SGLang knows it by."""

_FIELDS = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps", "speculative_eagle_topk")

#: (field of ServerArgs, value that is fine, name the user knows it by)
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("enable_mixed_chunk", False, "mixed chunks (--enable-mixed-chunk)"),
    ("tp_size", 1, "tensor parallelism (--tp-size)"),
    ("enable_lora", False, "LoRA (--enable-lora)"),
)

MOST_BY_TOKEN = 7
"""Tokens of a round with pages of one token: SGLang takes slots for two rounds ahead, and makes rows of `req_to_token`
so long only with longer pages. At the end of the context, the slots of more would stand in the next request's row.
"""


def arguments(config: SparseAttnConfig) -> dict[str, Any]:
    """What a server's record must say, by field; empty where steps by an index answer."""
    if config.exactness is not Exactness.VERIFY:
        return {}
    return dict(zip(_FIELDS, (NAME, config.draft_tokens + 1, config.draft_tokens, 1), strict=True))


def given_twice(given: Any, config: SparseAttnConfig) -> str | None:
    """What flags say that lossless decode sets, as a message; None where they say nothing of it."""
    for name in arguments(config):
        if getattr(given, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            return f"--sparse-attn: expected no {flag} with exactness verify, which sets it; remove {flag}."
    return None


def refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """Why a server cannot verify, as a message; None where it can, or does not.

    Args:
        record: SGLang's ServerArgs.
        config: ours.
    """
    named = getattr(record, "speculative_algorithm", None) == NAME
    if config.exactness is not Exactness.VERIFY:
        if not named:
            return None
        return (
            f"--sparse-attn: expected exactness verify in --sparse-attn-config with {NAME}; got "
            f"{config.exactness.value}. Set it, and leave --speculative-algorithm out."
        )
    if not named:
        return (
            "--sparse-attn: expected the server to be started with --sparse-attn-config, or by "
            "sglang_ext.plugin.server_args, for exactness verify; the configuration came later, by the environment."
        )
    if getattr(record, "page_size", None) == 1 and config.draft_tokens > MOST_BY_TOKEN:
        return (
            f"--sparse-attn: expected draft_tokens of at most {MOST_BY_TOKEN} with pages of one token, for more of "
            "which SGLang's table of slots has no room at the end of the context; got "
            f"{config.draft_tokens}. Lower it, or add --page-size 16."
        )
    return conflict(record, _UNSUPPORTED, " beside exactness verify")
