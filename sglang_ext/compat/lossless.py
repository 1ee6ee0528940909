"""Lossless decode as a speculative algorithm of SGLang: which one, what it asks of a server, what it does not go with.

Drafts and their verification are ordinary decode steps of the one model: an exact step attends a request and its drafts
as so many rows of different lengths on the same slots. So the model runner must not know of speculation, which would
capture graphs of another forward mode; the scheduler must, as a step gives several tokens.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

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


class Lossless(CustomSpecAlgo):  # type: ignore[misc]
    """Speculative to the scheduler, not to the model runner. What SGLang asks of NGRAM, which has no draft model
    either, holds here, too.
    """

    create_future_map = SpeculativeAlgorithm.create_future_map

    def is_speculative(self) -> bool:
        """What the model runner asks."""
        return False

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False


def register() -> None:
    """Make the algorithm known to SGLang in this process."""
    if get_spec(NAME) is None:
        SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Lossless)(_worker)


def _worker(_server_args: Any) -> type:
    from sglang_ext.compat.lossless_worker import LosslessWorker

    return LosslessWorker


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


def refusal(record: Any, config: SparseAttnConfig, *, decode_graphs: bool) -> str | None:
    """Why a server cannot verify, as a message; None where it can, or does not.

    Args:
        record: SGLang's ServerArgs.
        config: ours.
        decode_graphs: whether decode steps replay CUDA graphs, as far as is known.
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
    if decode_graphs:
        return (
            "--sparse-attn: expected decode CUDA graphs to be off with exactness verify, which was not tried in them; "
            "they are on. Add --disable-decode-cuda-graph, or remove exactness."
        )
    return conflict(record, _UNSUPPORTED, " beside exactness verify")
