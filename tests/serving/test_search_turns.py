"""Steps that share a search."""

from __future__ import annotations

from sglang_ext.decode.sparse import SearchTurns


def turns(period: int, steps: str) -> str:
    """S or K for each sparse step, - for another one; ? names groups whose slots may still change."""
    found, searches = "", SearchTurns(period)
    for groups in steps:
        if groups == "-":
            searches.skip()
            found += "-"
            continue
        searches.take(None if groups == "?" else groups)
        found += "S" if searches.searches else "K"
    return found


def test_a_search_serves_its_period_and_no_other_groups() -> None:
    assert turns(1, "AAAA") == "SSSS"
    assert turns(3, "AAAAAAA") == "SKKSKKS"
    assert turns(3, "AABBA") == "SKSKS"
    assert turns(3, "??AAA") == "SSSKK", "lists hold slots: none are kept that may change"
    assert turns(3, "AA?AA") == "SKSSK"


def test_steps_that_are_attended_otherwise_end_a_search() -> None:
    """What was found before them is older than the period says, however few steps used it."""
    assert turns(3, "AA-AAA-A") == "SK-SKK-S"


def test_nothing_is_kept_of_before_a_capture() -> None:
    searches = SearchTurns(4)
    searches.take("A")
    searches.begin(searches=False)
    assert not searches.searches, "a graph without selections is captured"
    searches.take("A")
    assert searches.searches
