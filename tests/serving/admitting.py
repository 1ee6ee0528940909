"""A runtime whose requests do not wait: most tests begin where a request has its slot."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sglang_ext.runtime import SparseRuntime


class Runtime(SparseRuntime):
    """`admit` gives a request its slot, too; `wait` leaves it in the queue, as SGLang does until it has one."""

    wait = SparseRuntime.admit

    def admit(self, request: Hashable, *args: Any, **kwargs: Any) -> None:
        super().admit(request, *args, **kwargs)
        self.slot_taken(request)
