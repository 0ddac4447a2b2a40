"""The dashboard page in a real browser: what it draws, what it keeps to itself, and other people's words in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.api.router import create_app
from serving.api.service import Service
from serving.overview import Overview
from shared.keys import WatchedKeys
from shared.store import Store
from tests.browser import Page, browser, find_browser
from tests.serving.api.dashboard_story import tell_a_story
from tests.serving.api.test_access import Keys
from tests.serving.test_overview import MINE, NOWHERE, own

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror=document.title='owned'>"
LINES = "document.querySelectorAll('#plot path').length"
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if find_browser() is None:
        message = "Chromium is missing: `make chromium`, or `apt install chromium`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with browser() as page:
        page.look()
        yield page


@pytest.fixture(autouse=True)
def _nothing_to_complain_of(page: Page) -> Iterator[None]:
    page.complaints.clear()
    yield
    assert page.complaints == []


def text(page: Page, id: str) -> str:
    return str(page.ask(f"document.getElementById('{id}').innerText"))


def test_it_draws_alpha_with_its_drifts_and_swaps(page: Page, serve: Serve, service: Service, store: Store) -> None:
    mine = tell_a_story(store, ("chat", "sql"))
    page.open(serve(create_app(service, None, Overview(MINE, store, lambda: mine))) + "/dashboard")
    page.until(f"{LINES} === 3")  # all, chat, sql
    marks = page.ask(
        "[...document.querySelectorAll('#plot text.swap, #plot text.drift')].map(text => text.textContent)"
    )
    assert sorted(marks) == ["▲ v2", "▼ sql", "▼ sql drifts"]
    assert "0.600" in text(page, "alpha")
    assert text(page, "alpha").count("sql") == 2  # under v1 and under v2
    assert "reading traces" in text(page, "learner")
    assert text(page, "decisions").index("promoted") < text(page, "decisions").index("refused"), (
        "the newest comes first"
    )
    assert "mine" in text(page, "replicas")
    assert "16 / 64" in text(page, "replicas")
    page.ask("[...document.querySelectorAll('#keys button')].find(button => button.innerText === 'sql').click()")
    page.until(f"{LINES} === 2")


def test_other_peoples_words_stay_words(page: Page, serve: Serve, service: Service, store: Store) -> None:
    """The API takes only plain names as domains; whoever writes to Redis is not held to that."""
    mine = tell_a_story(store, ("chat", MARKUP))
    page.open(serve(create_app(service, None, Overview(MINE, store, lambda: mine))) + "/dashboard")
    page.until(f"{LINES} === 3")
    assert page.ask("document.images.length") == 0
    for place in ("keys", "alpha", "learner", "decisions"):
        assert MARKUP.split("=")[0] in text(page, place), place
    assert "Redraft" in page.ask("document.title")


def test_a_key_is_asked_for_and_leaves_no_trace(
    page: Page, serve: Serve, service: Service, store: Store, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("web", "inference")
    keys.add("watcher", "metrics")
    address = serve(create_app(service, WatchedKeys(keys.path), Overview(MINE, store, own)))
    page.open(f"{address}/dashboard")

    def enter(secret: str) -> None:
        page.until("!document.getElementById('login').hidden")
        page.ask(f"document.getElementById('key').value = {json.dumps(secret)}")
        page.ask("document.querySelector('#login button').click()")

    enter(keys.secrets["web"])
    page.until("document.getElementById('refusal').textContent.includes(\"no scope 'metrics'\")")
    assert page.ask("sessionStorage.length") == 0
    enter(keys.secrets["watcher"])
    page.until("!document.getElementById('main').hidden")
    assert page.ask("location.href") == f"{address}/dashboard"
    assert page.ask("document.cookie + JSON.stringify(localStorage)") == "{}"
    assert page.ask("performance.getEntriesByType('resource').filter(entry => entry.name.includes('rd-')).length") == 0
    page.open(f"{address}/dashboard")
    page.until("!document.getElementById('main').hidden")  # the tab remembers it
    page.ask("document.getElementById('forget').click()")
    assert page.ask("sessionStorage.length") == 0
    page.until("!document.getElementById('login').hidden")


def test_with_redis_away_it_says_so_and_shows_its_own_replica(page: Page, serve: Serve, service: Service) -> None:
    page.open(serve(create_app(service, None, Overview(MINE, Store(NOWHERE, "x"), own))) + "/dashboard")
    page.until("!document.getElementById('trouble').hidden")
    assert "127.0.0.1:1" in text(page, "trouble")
    assert "mine" in text(page, "replicas")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_any_screen_by_day_and_by_night(
    page: Page, serve: Serve, service: Service, store: Store, dark: bool, width: int
) -> None:
    mine = tell_a_story(store, ("chat", "sql"))
    page.look(width=width, dark=dark)
    page.open(serve(create_app(service, None, Overview(MINE, store, lambda: mine))) + "/dashboard")
    page.until(f"{LINES} === 3")
    assert page.ask("document.documentElement.scrollWidth") <= width
    ink, paper = page.ask("['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])")
    assert (brightness(ink) > brightness(paper)) == dark
    page.look()


def brightness(colour: str) -> int:
    """Of `rgb(1, 2, 3)`."""
    return sum(int(part) for part in colour.strip("rgb()").split(","))
