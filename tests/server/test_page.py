"""The page at /sparse_attn in headless Chromium: what it shows, what its buttons do, and that names stay text.

Skipped where there is no Chromium: one on the PATH, playwright's own, or the program that SGLANG_EXT_CHROMIUM names.
SGLANG_EXT_PAGE_PICTURE=docs/images/page.png writes the picture of the documents.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, Retention
from tests.server.harness import ADMIN_KEY, Server
from tests.server.test_administration import index, told

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [pytest.mark.boot("production"), pytest.mark.full]
PROGRAMS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        program = os.environ.get("SGLANG_EXT_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
        program = program or started.chromium.executable_path
        if not Path(program).exists():
            pytest.skip("needs Chromium")
        try:
            browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error as error:  # libraries of the system that it lacks, for instance
            pytest.skip(f"needs a Chromium that starts; {program} does not: {str(error)[:500]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, production: Server) -> Iterator[Any]:
    """The page with its key; whatever goes wrong in it fails the test."""
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{production.url}/sparse_attn")
    page.fill("#key", ADMIN_KEY)
    page.click("text=Show")
    page.wait_for_selector("#rows tr")
    yield page
    assert wrong == []
    page.close()
    told(production, "on")


def _row(page: Any, name: str) -> Any:
    return page.locator("#rows tr", has=page.locator(f'td.name:text-is("{name}")'))


def test_it_asks_for_the_key_and_keeps_it_out_of_the_address(browser: Any, production: Server) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{production.url}/sparse_attn")
    page.wait_for_selector("#ask:not([hidden])")
    assert not page.is_visible("#shown")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("text=The server takes another key.")
    page.fill("#key", ADMIN_KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("#rows tr")
    assert not page.is_visible("#ask")
    assert not any(ADMIN_KEY in url for url in [*asked, page.url])
    page.close()


def test_it_shows_what_the_routes_say_and_its_buttons_act(page: Any, production: Server, texts: Any) -> None:
    production.generate(texts.ask(texts.first, 0), 4)
    one = index(production, "first")
    page.wait_for_function(
        "hits => [...document.querySelectorAll('#rows tr')].some(row => row.innerText.includes(hits))",
        arg=f"\t{one['hits']}\t",
    )
    cells = _row(page, "first").locator("td").all_inner_texts()
    assert cells[:2] == ["first", "1,536"]
    assert cells[4:7] == ["device, store", "0", f"{one['hits']:,}"]
    page.get_by_role("button", name="Pin first", exact=True).click()
    page.get_by_role("button", name="Unpin first", exact=True).wait_for()
    assert index(production, "first")["pinned"]
    assert page.get_by_role("button", name="Evict first", exact=True).is_disabled()
    page.get_by_role("button", name="Unpin first", exact=True).click()
    page.get_by_role("button", name="Evict first", exact=True).click()
    page.get_by_role("button", name="Load first", exact=True).click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('button')].some(one => one.ariaLabel === 'Load first' && one.disabled)"
    )
    page.click("#off")
    page.wait_for_selector("text=off: turned off by an operator")
    assert not told(production, "status")["indexes"]["on"]
    assert "indexes off, shared prefixes on" in page.inner_text("#said")
    page.click("#on")
    page.wait_for_selector("#off:not([disabled])")
    assert told(production, "status")["indexes"]["on"]


def test_a_name_from_a_prompts_file_stays_text(page: Any, production: Server, damaged: Any) -> None:
    digest = index(production, "second")["digest"]
    with FileStore(damaged[0]) as store:
        store.retain(digest, Retention(name=HOSTILE))
        try:
            page.wait_for_function("name => document.body.innerText.includes(name)", arg=HOSTILE, timeout=60_000)
            assert page.title() == "Sparse attention"
            assert page.locator("#rows img, #rows script").count() == 0
            page.get_by_role("button", name=f"Pin {HOSTILE}", exact=True).click()
            page.get_by_role("button", name=f"Unpin {HOSTILE}", exact=True).click()
        finally:
            store.retain(digest, Retention(name="second"))


def test_recall_and_time_saved_are_shown_where_there_are_any(page: Any) -> None:
    """Columns of figures that a server may not have: answers of the routes with them, as the page takes them."""
    recalls = iter([0.9, 0.95, 0.99] + [0.97] * 100)

    def with_figures(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        body["indexes"][0] |= {"recall": next(recalls), "saved_s": 7200.0}
        route.fulfill(response=answer, json=body)

    page.route("**/sparse_attn/indexes", with_figures)
    for _ in range(3):
        page.evaluate("show()")
    first = page.locator("#rows tr").first
    page.wait_for_selector("#rows svg")
    assert "2.0 h" in first.inner_text()
    assert re.fullmatch(r"from \d+\.\d% to 9\d\.0%", first.locator("svg").get_attribute("aria-label"))
    page.unroute_all(behavior="wait")


def unanswered(page: Any) -> None:
    """One question to the server fails."""
    page.route("**/sparse_attn/status", lambda route: route.abort())
    page.evaluate("show()")
    page.wait_for_selector("text=The server does not answer.")
    page.unroute_all(behavior="wait")


def test_a_server_that_does_not_answer_is_said_and_forgotten(page: Any) -> None:
    unanswered(page)
    page.evaluate("show()")
    page.wait_for_selector("#said:empty", state="attached")


def test_what_became_of_a_command_is_said_when_the_server_answers_again(page: Any) -> None:
    unanswered(page)
    page.evaluate("tell('unpin', { index: 'no such index' })")
    assert "no such index" in page.inner_text("#said")


def test_time_lost_is_told_as_time_saved_is(page: Any) -> None:
    assert page.evaluate("[-9000, -300, -1.25, 9000].map(seconds)") == ["-2.5 h", "-5.0 min", "-1.3 s", "2.5 h"]


def test_of_indexes_that_are_shown_no_more_nothing_is_kept(page: Any) -> None:
    """A page that stays open for weeks."""
    script = """async () => {
        const { indexes } = await ask("indexes");
        prefixes(indexes.map(one => ({ ...one, recall: 0.5 })));
        const before = recalls.size === indexes.length && recalls.size > 0;
        prefixes([]);
        return [before, recalls.size];
    }"""
    assert page.evaluate(script) == [True, 0]


def test_on_a_phone_nothing_is_cut_and_everything_has_a_name(page: Any, texts: Any, production: Server) -> None:
    for document in (texts.first, texts.second, texts.large):
        production.generate(texts.ask(document, 0), 8)
    page.evaluate("show()")
    picture = os.environ.get("SGLANG_EXT_PAGE_PICTURE")
    if picture:
        page.wait_for_timeout(1000)
        page.screenshot(path=picture)
    page.set_viewport_size(PHONE)
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen == PHONE["width"]
    assert _row(page, "first").is_visible()
    cell = (
        page.get_by_role("table", name="Prefixes")
        .get_by_role("row")
        .get_by_role("cell", name="Prefix first", exact=True)
    )
    assert cell.is_visible(), "a table for those who hear it, too"
    named = "one => one.ariaLabel || one.innerText?.trim() || one.labels?.length"
    assert page.evaluate(f"[...document.querySelectorAll('button, input, svg')].every({named})")
    small = "[...document.querySelectorAll('#shown button')].filter(one => one.offsetHeight < 44).length"
    assert page.evaluate(small) == 0
