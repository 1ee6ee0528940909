"""What a request's response says of its decode steps: `meta_info["sparse_attn"]`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.prefix.requests import Attachment

KEY = "sparse_attn"


class Told:
    """Stands where SGLang has one value for each output token, which it sends with the tokens and strings together.

    Its slices are empty until the request has finished; then one summary is all.

    Args:
        req: SGLang's request; held weakly, as it holds this.
        attachment: what is known of it.
    """

    def __init__(self, req: Any, attachment: Attachment) -> None:
        self._req = weakref.ref(req)
        self._attachment = attachment

    def __getitem__(self, tokens: slice) -> list[dict[str, Any]]:
        req = self._req()
        if req is None or not req.finished():
            return []
        return [self._attachment.told(tokens.stop)]


def tell(req: Any, attachment: Attachment | None) -> None:
    """Let a request's response say how it was decoded."""
    if attachment is not None:
        if req.customized_info is None:
            req.customized_info = {}
        req.customized_info.setdefault(KEY, Told(req, attachment))
