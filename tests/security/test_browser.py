"""Pages in a browser: they load without an error, do what their buttons say, and run no name.

Skipped where there is no Playwright or no Chromium; CHROMIUM names another one than `chromium`.
"""

import os
import shutil

import numpy as np
import pytest

from dovetail.reports import PlanReport
from dovetail.reports.page import render
from tests.reports.test_page import small_report
from tests.security.test_pages import HOSTILE, PAGES, page_of
from tests.support.report_samples import make_machine, make_plan, run_in_order, training_chain

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright to drive a page")
    if CHROMIUM is None:
        pytest.skip("no chromium to draw the page")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, tmp_path):
    """opened(text) -> the page; all that it must not do fails the test at its end."""
    context = browser.new_context()
    wrong = []

    def open_page(text):
        path = tmp_path / "opened.html"
        path.write_bytes(text.encode("utf-8", "replace"))
        page = context.new_page()
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: None if r.url == path.as_uri() else wrong.append(r.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    context.close()
    assert wrong == []


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_with_hostile_names_loads_and_asks_for_nothing(kind, name, opened, tmp_path):
    page = opened(page_of(kind, name, tmp_path))
    for summary in page.locator("summary:visible").all():
        summary.click()
    # Whatever has a name in it is pointed at, and so is every button pressed.
    for part in page.locator("svg:visible, canvas:visible").all()[:4]:
        part.hover(force=True)
    for button in page.locator("button:visible").all()[:20]:
        button.click()
    assert page.locator("h1").count() == 1
    assert page.locator("img, iframe, object, embed").count() == 0


def test_what_watches_a_page_sees_an_injected_script_and_a_request(browser, tmp_path):
    page, seen = browser.new_page(), []
    page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen.append(request.url))
    (tmp_path / "p.html").write_text("<img src='x.png' onerror='alert(1)'>")
    page.goto((tmp_path / "p.html").as_uri())
    page.wait_for_load_state()
    page.close()
    assert [each.rpartition("/")[2] for each in seen] == ["p.html", "x.png", "1"]


def test_a_handler_that_got_in_would_be_stopped_by_the_pages_own_policy(browser, tmp_path):
    page, dialogs = browser.new_page(), []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    evil = "<img src='x.png' onerror='alert(1)'><script>alert(2)</script></body>"
    (tmp_path / "p.html").write_text(render(small_report()).replace("</body>", evil))
    page.goto((tmp_path / "p.html").as_uri())
    page.wait_for_load_state()
    page.close()
    assert dialogs == []


def test_the_timeline_zooms_by_wheel_keys_and_double_click(opened):
    page = opened(render(small_report()))
    canvas = page.locator("#timeline")

    def drawn():
        return canvas.evaluate("(canvas) => canvas.toDataURL()")

    whole = drawn()
    canvas.hover()
    page.mouse.wheel(0, -400)
    page.wait_for_timeout(200)
    zoomed = drawn()
    assert zoomed != whole
    page.locator("#reset").click()
    page.wait_for_timeout(200)
    canvas.dblclick()
    page.wait_for_timeout(200)
    assert drawn() != whole
    canvas.focus()
    for key in ("ArrowRight", "ArrowLeft", "+", "-", "0"):
        page.keyboard.press(key)
    page.mouse.move(0, 0)
    page.wait_for_timeout(200)
    page.locator("#find").fill("no such op")
    page.locator("#critical").check()
    page.locator("#colour").select_option("kind")


def test_a_button_of_the_table_unfolds_the_table_and_the_graph_and_folds_them_again(opened):
    machine = make_machine(2)
    graph = training_chain(16)
    placement = np.zeros(len(graph), dtype=int)
    predicted = run_in_order(graph, machine, placement, np.full(len(graph), 1e-6))
    page = opened(render(PlanReport(make_plan(graph, machine, placement), graph, predicted)))
    button = page.locator('#layers button[aria-expanded="false"]').first.element_handle()

    def shown():
        rows = page.locator("#layers tr[data-fold]:visible").count()
        return rows, page.locator("#view option").first.text_content()

    before = shown()
    assert before[1] == "modules (3)"  # four of each phase for one
    for press in (button.click, lambda: (button.focus(), page.keyboard.press("Enter"))):
        press()
        assert shown() == (before[0] + 4, "modules (12)")
        assert button.get_attribute("aria-expanded") == "true"
        press()
        assert shown() == before
