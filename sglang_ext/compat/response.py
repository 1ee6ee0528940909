"""What a request's response says of its decode steps: `meta_info["sparse_attn"]`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.prefix.requests import Attachment

KEY = "sparse_attn"


class Told:
    """Stands where SGLang has one value for each output token, which it sends with the tokens and strings together.

    Its slices are empty until the request has finished; then one summary is all. Of a stream that sends each token once
    (`--incremental-streaming-output`) SGLang cuts them by the tokens: there they have None for each but the last.

    Args:
        req: SGLang's request; held weakly, as it holds this.
        attachment: what is known of it.
        incremental: whether streams send each token once.
    """

    def __init__(self, req: Any, attachment: Attachment, incremental: bool) -> None:
        self._req = weakref.ref(req)
        self._attachment = attachment
        self._by_token = incremental and req.stream

    def __getitem__(self, tokens: slice) -> list[dict[str, Any] | None]:
        req = self._req()
        told = [self._attachment.told(tokens.stop)] if req is not None and req.finished() else []
        spare = tokens.stop - tokens.start - len(told) if self._by_token else 0
        return [*[None] * spare, *told]


def tell(req: Any, attachment: Attachment, *, incremental: bool) -> None:
    """Let a request's response say how it was decoded; see `Told`."""
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info.setdefault(KEY, Told(req, attachment, incremental))
