"""Tensor parallelism: which settings do not go with it yet, and the group through which our ranks agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sglang_ext.options import Build, SparseAttnConfig
from sglang_ext.ranks import ProcessRanks, Ranks

#: (field of ServerArgs, value that is fine, name the user knows it by)
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("nnodes", 1, "more than one machine (--nnodes)"),
    ("attn_cp_size", 1, "context parallelism (--attn-cp-size)"),
    ("dcp_size", 1, "decode context parallelism (--dcp-size)"),
    ("enable_dp_attention", False, "attention data parallelism (--enable-dp-attention)"),
    ("elastic_ep_backend", None, "elastic expert parallelism (--elastic-ep-backend)"),
)

_CLOCKS = ("SGLANG_REQ_RUNNING_TIMEOUT", "SGLANG_REQ_WAITING_TIMEOUT")
"""Of SGLang before 0.5.21: each rank looks at them by itself."""


def refusal(record: Any, config: SparseAttnConfig) -> str | None:
    """What of SGLang's ServerArgs and of our settings does not go with tensor parallelism, as a message; None if all
    does, or without it.
    """
    size = int(getattr(record, "tp_size", 1) or 1)
    if size == 1:
        return None
    if config.build is Build.CAPTURE:
        return (
            "--sparse-attn: expected build off, prefill or shared with tensor parallelism (--tp-size); got "
            f"build={config.build.value!r} and tp_size={size}. A rank sees only its own KV heads: calibrate on one GPU."
        )
    if config.trace_folder is not None:
        return (
            f"--sparse-attn: expected no trace_folder with tensor parallelism (--tp-size); got tp_size={size}. A rank "
            "selects for its own KV heads only: remove trace_folder, or serve on one GPU."
        )
    for name in _CLOCKS:
        if os.environ.get(name, "-1").strip() not in ("", "-1", "0"):
            return (
                f"--sparse-attn: expected {name} unset with tensor parallelism; got {os.environ[name]!r}. A rank ends "
                "requests by its own clock then, so ranks may run different batches: unset it, or end requests from "
                "the client."
            )
    return conflict(record, _UNSUPPORTED, " beside tensor parallelism", f" and tp_size={size}")


def ranks_of(rank: int, size: int) -> Ranks:
    """The ranks of this server, by the place in SGLang's tensor-parallel group. A collective with more than one: every
    scheduler process builds its backend once.

    The group is our own, so that no call of SGLang's, from whatever thread, comes between ours.

    Raises:
        RuntimeError: SGLang's processes are not the tensor-parallel ranks alone.
    """
    if size == 1:
        return Ranks()
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != size or dist.get_rank() != rank:
        raise RuntimeError(
            f"--sparse-attn: expected {size} processes, one for each tensor-parallel rank; got {world}. Use no other "
            "parallelism beside --tp-size."
        )
    return ProcessRanks(dist.new_group(list(range(size)), backend="gloo"))


def conflict(record: Any, fields: Sequence[tuple[str, Any, str]], beside: str = "", got: str = "") -> str | None:
    """What a record has set that does not go with us, as a message; None where nothing is.

    Args:
        record: SGLang's ServerArgs.
        fields: (field, value that is fine, name the user knows it by); the first one that is set otherwise is named.
        beside: what else it does not go with, as ` beside ...`.
        got: that one's value, as ` and field=...`.
    """
    for field, fine, name in fields:
        value = getattr(record, field, fine)
        if value is not None and value != fine:
            return (
                f"--sparse-attn: expected no {name}{beside}; got {field}={value!r}{got}. "
                "This combination is not supported yet: remove one of the two."
            )
    return None
