"""SGLang's prefix cache, and requests whose first P tokens lie in host memory.

The tree knows such a request from token P on, in a namespace of the prefix (`Offload.key`), with its real slots: it
matches, inserts, locks, splits and evicts as ever, and never sees a virtual slot. What SGLang's scheduler is told has P
virtual slots in front, all of them protected, so that nobody frees them.

    scheduler    [ P virtual slots | m matched slots | new slots ... ]     req_to_token, prefix length P + m
    tree                           [ m matched slots | new slots ... ]     key: namespace of the prefix, tokens[P:]

The tree's own methods do all work: they are handed the request, and the table of slots, as seen from token P on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sglang_ext.offload.directory import Offload
from sglang_ext.offload.offloading import Offloading
from sglang_ext.prefix.requests import Attachment

_LENGTHS = ("cache_protected_len", "cache_inserted_len", "prefix_len")
_TOKENS = ("origin_input_ids", "full_untruncated_fill_ids")


class _Shifted:
    """An object of SGLang's with lengths, and lists of tokens, counted from token P on."""

    def __init__(self, of: Any, offload: Offload, front: Callable[[], Tensor]) -> None:
        self.__dict__.update(_of=of, _offload=offload, _front=front)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name in _LENGTHS:
            return max(0, found - self._offload.prefix_len)
        if name in _TOKENS:
            return found[self._offload.prefix_len :]
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LENGTHS:
            value += self._offload.prefix_len
        setattr(self._of, name, value)


class ShiftedRequest(_Shifted):
    """A request as the tree sees it."""

    @property
    def extra_key(self) -> str:
        return str(self._offload.key)

    @property
    def kv(self) -> Any:
        kv = self._of.kv
        return None if kv is None else _Shifted(kv, self._offload, self._front)

    def get_fill_ids(self) -> Any:
        return self._of.get_fill_ids()[self._offload.prefix_len :]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "prefix_indices":
            value = torch.cat([self._front(), value])
        super().__setattr__(name, value)


class ShiftedTable:
    """SGLang's `ReqToTokenPool` from token P on."""

    def __init__(self, pool: Any, prefix_len: int) -> None:
        self._pool, self._prefix_len = pool, prefix_len
        self.req_to_token = pool.req_to_token[:, prefix_len:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def write(self, indices: tuple[Any, slice], values: Tensor) -> None:
        row, part = indices
        self._pool.write((row, slice(part.start + self._prefix_len, part.stop + self._prefix_len)), values)


class OffloadedTree:
    """Puts itself before the methods of one prefix cache.

    Args:
        tree: SGLang's.
        offloading: of this process.
        attachment: what is known of a request.
    """

    def __init__(self, tree: Any, offloading: Offloading, attachment: Callable[[Any], Attachment | None]) -> None:
        self._tree, self._offloading, self._attachment = tree, offloading, attachment

    def install(self) -> None:
        """Replace methods of this one object; each delegates for requests without a prefix in host memory."""
        tree = self._tree
        for name in ("cache_finished_req", "cache_unfinished_req", "checkpoint_into_tree"):  # the last one of 0.5.23
            if hasattr(tree, name):
                setattr(tree, name, self._cached_by(getattr(tree, name)))
        if hasattr(tree, "prefix_device_indices"):  # 0.5.23
            tree.prefix_device_indices = self._indices_by(tree.prefix_device_indices)
        reset = tree.reset

        def reset_and_drop() -> None:
            reset()
            self._offloading.drop()

        tree.reset = reset_and_drop

    def match(self, match: Callable[[Any], Any], params: Any) -> Any:
        """`match_prefix` of a request, by the tree's own."""
        request, limit = params.req, len(params.key)
        offload = self._offloading.wanted(request, self._attachment(request), limit)
        if offload is None:
            return match(params)
        key = params.key[offload.prefix_len :]
        key.extra_key = offload.key
        result = match(replace(params, key=key))
        if hasattr(result, "device_indices"):  # until 0.5.16
            front = self._front(offload)
            length = offload.prefix_len + len(result.device_indices)
            own = {"device_indices": torch.cat([front, result.device_indices.to(front)])}
        else:
            length = offload.prefix_len + result.device_prefix_len
            own = {"device_prefix_len": length}
        return result._replace(cache_protected_len=length, **own)

    def _front(self, offload: Offload) -> Tensor:
        return self._offloading.virtual_slots(offload, self._tree.device)

    def _request(self, request: Any, offload: Offload) -> ShiftedRequest:
        return ShiftedRequest(request, offload, lambda: self._front(offload))

    @contextmanager
    def _behind(self, offload: Offload) -> Iterator[None]:
        """Within the block the tree reads and writes the table from token P on."""
        tree = self._tree
        whole = tree.req_to_token_pool
        tree.req_to_token_pool = ShiftedTable(whole, offload.prefix_len)
        try:
            yield
        finally:
            tree.req_to_token_pool = whole

    def _of(self, request: Any) -> Offload | None:
        """What a request with a slot has in front."""
        row = row_of(request)
        return None if row is None else self._offloading.of_row(row)

    def _cached_by(self, inner: Callable[..., None]) -> Callable[..., None]:
        def cached(req: Any, *args: Any, **kwargs: Any) -> None:
            offload = self._of(req)
            if offload is None:
                return inner(req, *args, **kwargs)
            for length in ("kv_len_to_handle", "up_to"):
                if length in kwargs:
                    kwargs[length] -= offload.prefix_len
            with self._behind(offload):
                return inner(self._request(req, offload), *args, **kwargs)

        return cached

    def _indices_by(self, inner: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def indices(req: Any) -> Tensor:
            offload = self._offloading.matched(req) or self._of(req)
            if offload is None:
                return inner(req)
            found = inner(self._request(req, offload))
            front = self._front(offload)
            return torch.cat([front, found.to(front)])

        return indices


def row_of(request: Any) -> int | None:
    """A request's row of `req_to_token`, on every release; None while it has none."""
    row = getattr(getattr(request, "kv", None), "req_pool_idx", None)
    if row is None:
        row = getattr(request, "req_pool_idx", None)
    return None if row is None else int(row)
