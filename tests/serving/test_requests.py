"""What is known of requests, from admission until SGLang forgets them."""

from __future__ import annotations

import gc

from sglang_ext.prefix.requests import Attachment, RequestTable


class Request:
    """As SGLang's: compared by identity, and weakly referenceable."""


def test_a_request_is_known_by_object_and_by_id() -> None:
    table, request = RequestTable(), Request()
    attachment = Attachment("a", 10, None, "no_index")
    assert not table.known(request)
    assert table.add(request, attachment) == []
    assert table.known(request)
    assert table.get("a") is table.of(request) is attachment
    assert table.get("b") is None
    assert len(table) == 1


def test_a_dropped_request_is_gone_and_its_id_can_come_again() -> None:
    table, old, new = RequestTable(), Request(), Request()
    table.add(old, Attachment("a", 10, None, "no_index"))
    table.drop(old)
    assert (table.get("a"), len(table)) == (None, 0)
    attachment = Attachment("a", 10, None, "no_index")
    assert table.add(new, attachment) == [], "no twin: the first one ended"
    assert table.get("a") is attachment


def test_a_second_live_request_of_one_id_leaves_both_without_index() -> None:
    table, one, two = RequestTable(), Request(), Request()
    first, second = Attachment("a", 10, None, None), Attachment("a", 12, None, None)
    table.add(one, first)
    assert table.add(two, second) == [first, second]
    assert first.reason == second.reason == "unsupported_mode"
    assert "one id" in str(first.detail)


def test_a_request_that_vanishes_without_ending_is_handed_over_to_be_released() -> None:
    table, request = RequestTable(), Request()
    attachment = Attachment("a", 10, None, None)
    table.add(request, attachment)
    assert table.take_forgotten() == []
    del request
    gc.collect()
    assert table.take_forgotten() == [attachment]
    assert table.take_forgotten() == []
    assert (len(table), table.get("a")) == (0, None)
