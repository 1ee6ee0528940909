"""What is known of requests, from admission until SGLang forgets them."""

from __future__ import annotations

import gc

from sglang_ext.prefix.requests import Attachment, RequestTable
from tests.serving.admitting import Request


def _running(table: RequestTable, rid: str = "a") -> tuple[Request, Attachment]:
    """A request with a slot."""
    request, attachment = Request(), Attachment(rid, 10, None, "no_index")
    table.add(request, attachment)
    assert table.enter(request) == []
    return request, attachment


def test_a_request_is_known_by_object_from_admission_on_and_by_id_while_it_has_a_slot() -> None:
    table, request = RequestTable(), Request()
    attachment = Attachment("a", 10, None, "no_index")
    assert not table.known(request)
    table.add(request, attachment)
    assert table.known(request)
    assert (table.of(request), table.get("a"), len(table), table.has_slot(attachment)) == (attachment, None, 0, False)
    assert table.enter(request) == []
    assert (table.get("a"), table.get("b"), len(table), table.has_slot(attachment)) == (attachment, None, 1, True)
    table.leave(request, finished=False)
    assert (table.of(request), table.get("a"), len(table)) == (attachment, None, 0)
    table.enter(request)
    table.leave(request, finished=True)
    assert (table.of(request), table.get("a"), table.known(request)) == (None, None, False)
    _, another = _running(table)
    assert table.get("a") is another, "the id can come again"


def test_a_second_running_request_of_one_id_leaves_both_without_index() -> None:
    table, two = RequestTable(), Request()
    one, first = _running(table)
    second = Attachment("a", 12, None, None)
    table.add(two, second)
    assert first.reason == "no_index", "one that waits does no harm"
    assert table.enter(two) == [first, second]
    assert first.reason == second.reason == "unsupported_mode"
    assert "one id" in str(first.detail)
    table.leave(two, finished=True)
    assert table.get("a") is first
    assert first.reason == "unsupported_mode", "what was shared out by its id cannot be told apart any more"
    table.leave(one, finished=True)
    assert len(table) == 0


def test_a_request_that_vanishes_without_giving_its_slot_back_is_handed_over_to_be_released() -> None:
    table = RequestTable()
    request, attachment = _running(table)
    waiting = Request()
    table.add(waiting, Attachment("b", 10, None, None))
    assert table.take_forgotten() == []
    del request, waiting
    gc.collect()
    assert table.take_forgotten() == [attachment]
    assert table.take_forgotten() == []
    assert (len(table), table.get("a")) == (0, None)
