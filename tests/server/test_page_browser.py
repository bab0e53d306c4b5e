"""The page as people use it, in a Chromium without a window. Skipped where Playwright or the browser is missing."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from obole.server.page import ASSETS

from .conftest import Serve, Served
from .puppets import TEMPLATE, always_drafting, open_speaking

playwright = pytest.importorskip("playwright.sync_api")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
ENDLESS = (
    TEMPLATE.removesuffix("{% endif %}").rstrip("\n") + "a{% endif %}"
)  # the answer is the rest of the alphabet, and again
SECONDS = 20.0  # to wait for what should come at once


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve_slow(tmp_path: Path, serve_engine: Serve) -> Callable[[], Served]:
    """Serves a model that says the alphabet again and again, about 60 letters a second."""

    def start() -> Served:
        engine = open_speaking(tmp_path, ["unused"], template=ENDLESS, speculate="off")
        quick = engine._step

        def slow() -> None:
            time.sleep(0.015)
            quick()

        engine._step = slow  # type: ignore[method-assign]
        return serve_engine(engine)

    return start


Open = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server. In the end nothing may have been written to the console but `expected` failures to load."""
    pages: list[tuple[Page, list[str], tuple[str, ...]]] = []

    def start(served: Served, *, expected: tuple[str, ...] = (), **options: Any) -> Page:
        page = browser.new_page(**{"viewport": {"width": 1200, "height": 800}, **options})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_default_timeout(1000 * SECONDS)
        page.goto(served.url)
        page.wait_for_selector('#health[data-state="ok"]')
        pages.append((page, said, expected))
        return page

    yield start
    for page, said, expected in pages:
        page.close()
        assert [text for text in said if not any(part in text for part in expected)] == []


def send(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def ended(page: Page) -> None:
    page.wait_for_selector("#send:visible")


def until(page: Page, holds: str) -> None:
    """Wait until an expression holds. The page's policy lets nothing else evaluate strings in it."""
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(holds):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(20)


def last_text(page: Page) -> str:
    return "".join(page.locator(".turn:last-child .token").all_text_contents())


PIECES = ["Hello", " <b>", "you", "</b>", "\n\n", "```py\n", "x = 1\n", "```", "\n**", "bold", "**"]


def test_a_question_is_answered_with_a_receipt(serve_speaking: Serve, visit: Open) -> None:
    page = visit(serve_speaking(PIECES))
    assert page.inner_text("#model") == "puppet"
    page.fill("#input", "two")
    page.press("#input", "Shift+Enter")
    page.type("#input", "lines")
    page.press("#input", "Enter")
    ended(page)
    assert page.inner_text(".said-by-you") == "two\nlines"
    assert last_text(page).removeprefix("Copy").replace("Copy```", "```") == "".join(PIECES)
    assert page.locator(".text b").count() == 0  # text stays text
    assert page.inner_text(".block.code .token:not(.mark)") == "x = 1\n"
    assert page.inner_text(".token.bold:not(.mark)") == "bold"
    assert page.locator(".token").count() >= len(PIECES)
    assert page.locator(".token.model").count() > 0
    page.click(".receipt summary")
    receipt = page.inner_text(".receipt .lines")
    assert f"{len(PIECES) + 1} tokens" in receipt
    assert "cached on device" in receipt
    assert "price" not in receipt
    page.click("#settings > summary")
    page.fill("#rate", "2.5")
    page.press("#rate", "Tab")
    assert "at $2.50 an hour" in page.inner_text(".receipt .lines")


def test_tokens_are_tinted_by_their_source(tmp_path: Path, serve_engine: Serve, visit: Open) -> None:
    page = visit(serve_engine(always_drafting(open_speaking(tmp_path, ["unused"], template=ENDLESS))))
    page.click("#settings > summary")
    page.fill("#max_tokens", "200")
    page.press("#max_tokens", "Tab")
    send(page, "go")
    ended(page)
    assert "cut off at its limit" in page.inner_text(".notice")
    alphabet = "bcdefghijklmnopqrstuvwxyza" * 8
    assert last_text(page) == alphabet[:200]
    colours = {
        source: page.eval_on_selector(f".token.{source}", "e => getComputedStyle(e).backgroundColor")
        for source in ("model", "lookup")
    }
    assert colours["model"] != colours["lookup"]
    tokens = page.eval_on_selector_all(".token.lookup", "all => all.length")
    page.click(".receipt summary")
    row = page.locator(".receipt .part", has_text="lookup")
    assert row.locator("dd").inner_text() == str(tokens)
    page.hover(".token.lookup")
    assert "lookup" in page.inner_text("#tip")
    assert "probability" in page.inner_text("#tip")
    page.uncheck("#tint")
    page.click("text=Retry")
    ended(page)
    page.wait_for_selector(".receipt.settled")
    assert last_text(page) == alphabet[:200]  # asked for without probabilities, which cost time
    page.hover(".token")
    assert page.is_visible("#tip")
    assert "probability" not in page.inner_text("#tip")
    page.mouse.move(0, 0)
    assert page.eval_on_selector(".token", "e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_figures_are_live(serve_slow: Callable[[], Served], visit: Open) -> None:
    page = visit(serve_slow())
    send(page, "go")
    until(page, "parseInt(document.querySelector('#throughput').textContent) > 20")
    assert page.inner_text("#running") == "1"
    page.press("#input", "Escape")
    ended(page)
    until(page, "document.querySelector('#running').textContent === '0'")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_can_be_stopped_and_asked_again(serve_slow: Callable[[], Served], visit: Open, how: str) -> None:
    served = serve_slow()
    page = visit(served)
    send(page, "go")
    until(page, "document.querySelectorAll('.token').length > 5")
    if how == "button":
        page.click("#stop")
    else:
        page.press("#input", "Escape")
    ended(page)
    assert "Stopped" in page.inner_text(".notice")
    before = last_text(page)
    assert before.startswith("bcdefg")
    while served.server.engine.snapshot().running:
        page.wait_for_timeout(20)
    page.click("text=Retry")
    until(page, "document.querySelectorAll('.token').length > 5")
    assert page.locator(".answer").count() == 1
    assert "Stopped" not in page.inner_text(".answer")
    page.press("#input", "Escape")
    ended(page)


def test_the_last_message_can_be_edited(serve_speaking: Serve, visit: Open) -> None:
    served = serve_speaking(["Hello", " you"], log_prompts=True)
    asked: list[Any] = []
    served.server.log.request = lambda record: asked.append(record.prompt)  # type: ignore[method-assign]
    page = visit(served)
    page.click("#settings > summary")
    page.fill("#system", "Be brief.")
    for text in ("one", "two"):
        send(page, text)
        ended(page)
    page.press("#input", "ArrowUp")
    assert page.input_value("#input") == "two"
    page.press("#input", "Escape")
    assert page.input_value("#input") == ""
    page.press("#input", "ArrowUp")
    send(page, "three")
    ended(page)
    assert page.locator(".said-by-you").all_inner_texts() == ["one", "three"]
    said = [(m["role"], m["content"]) for m in next(filter(None, reversed(asked)))[0]]
    assert said == [("system", "Be brief."), ("user", "one"), ("assistant", "Hello you"), ("user", "three")]
    page.click("#fresh")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#welcome")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(serve_speaking: Serve, visit: Open) -> None:
    page = visit(serve_speaking(["Hello"], api_keys=("secret",)), expected=("401",))
    page.wait_for_selector("#trouble:visible")
    send(page, "go")
    page.wait_for_selector(".error")
    assert "API key" in page.inner_text(".error")
    page.click("text=Enter the API key")
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    until(page, "document.querySelector('#model').textContent === 'puppet'")
    page.click(".error >> text=Retry")
    page.wait_for_selector(".receipt.settled")
    assert last_text(page) == "Hello"
    page.wait_for_selector("#trouble", state="hidden")
    page.fill("#system", "Kept.")
    page.press("#system", "Tab")
    assert page.evaluate("[sessionStorage['obole.key'], JSON.stringify(localStorage).includes('secret')]") == ["secret", False]
    page.reload()
    assert (page.input_value("#key"), page.input_value("#system")) == ("secret", "Kept.")


def test_what_goes_wrong_is_said_in_its_place(serve_slow: Callable[[], Served], visit: Open) -> None:
    served = serve_slow()
    page = visit(served, expected=("400", "503", "ERR_"))
    page.click("#settings > summary")
    page.fill("#temperature", "-1")
    send(page, "go")
    assert page.locator(".turn").count() == 0  # the browser says what is wrong with the field
    page.fill("#temperature", "")
    page.fill("#max_tokens", "100000000")
    send(page, "go")
    page.wait_for_selector(".error")
    assert "max_tokens" in page.inner_text(".error")
    page.fill("#max_tokens", "")
    page.click(".error >> text=Retry")
    until(page, "document.querySelectorAll('.token').length > 5")
    served.drain()  # its time is up at once: the answer is lost in the middle
    page.wait_for_selector(".error")
    assert "shut down" in page.inner_text(".error")
    assert last_text(page).startswith("bcdefg")
    served.thread.join(30)
    page.click(".error >> text=Retry")
    page.wait_for_selector(".error")
    assert "cannot be reached" in page.inner_text(".error")
    page.wait_for_selector('#health[data-state="gone"]')


def test_models_with_several_names_can_be_chosen(serve_speaking: Serve, visit: Open) -> None:
    page = visit(serve_speaking(["Hello"], model_names=("one", "two")))
    page.select_option("#models", "two")
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "go")
    ended(page)
    assert request.value.post_data_json["model"] == "two"
    assert last_text(page) == "Hello"


def test_dark_and_narrow(serve_speaking: Serve, visit: Open) -> None:
    served = serve_speaking(["Hello"])
    light, dark = (visit(served, color_scheme=scheme) for scheme in ("light", "dark"))
    paper = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(paper) != dark.evaluate(paper)
    narrow = visit(served, viewport={"width": 360, "height": 640})
    assert not narrow.is_visible("#panel")
    send(narrow, "go")
    ended(narrow)
    assert narrow.evaluate("document.documentElement.scrollWidth") == 360
    narrow.click("#toggle")
    assert narrow.is_visible("#panel")
    assert narrow.get_attribute("#toggle", "aria-expanded") == "true"


# For each text: the pieces that come one after the other, all of the same token source, as the server would send them.
SHOWN = """
async (texts) => {
  const { Answer } = await import("/page/answer.js");
  const encoder = new TextEncoder();
  const chunk = (text) => ({
    choices: [{ delta: { content: text }, logprobs: { content: [{ bytes: [...encoder.encode(text)], logprob: -1 }] } }],
    obole: { sources: ["model"] },
  });
  return texts.map((pieces) => {
    const answer = new Answer(() => {});
    for (const piece of pieces) {
      answer.push(chunk(piece));
      answer._show(); // as if there were a frame between any two
    }
    answer.finish(null, "stop", null);
    const tokens = [...answer.element.querySelectorAll(".token")];
    return [tokens.map((token) => token.textContent).join(""), new Set(tokens.map((token) => token.dataset.token)).size];
  });
}
"""


@pytest.fixture(scope="module")
def modules(browser: Browser) -> Iterator[Page]:
    """A page that has the modules and nothing else: no server is needed."""
    page = browser.new_page()

    def serve(route: Any) -> None:
        asset = ASSETS.get(route.request.url.rpartition("/")[2])
        route.fulfill(body=asset.content.decode() if asset else "", content_type=asset.type if asset else "text/html")

    page.route("**/*", serve)
    page.goto("http://page.test/")
    yield page
    page.close()


def test_all_text_is_shown_whatever_its_markdown(modules: Page) -> None:
    chance = random.Random(5)
    parts = [
        "```",
        "``",
        "`",
        "**",
        "*",
        "__",
        "_",
        "~~~",
        "\n",
        "\n\n",
        " ",
        "# ",
        "- ",
        "1. ",
        "> ",
        "|a|b|",
        "word",
        "é",
        "🙂",
        "  ",
    ]
    texts = [[chance.choice(parts) * chance.choice((1, 1, 2)) for _ in range(chance.randrange(1, 40))] for _ in range(400)]
    for pieces, (shown, tokens) in zip(texts, modules.evaluate(SHOWN, texts), strict=True):
        assert shown == "".join(pieces), json.dumps(pieces)
        assert tokens == len(pieces), json.dumps(pieces)


ALIGNED = """
async (chunks) => {
  const { TokenText } = await import("/page/text.js");
  const content = new TokenText();
  for (const [text, tokens] of chunks) {
    const spellings = tokens.filter(([, bytes]) => bytes).map(([, bytes]) => ({ bytes, logprob: -1 }));
    content.push(text, tokens.map(([source]) => source), spellings);
  }
  return content.pieces.map(({ start, end, source }) => [content.text.slice(start, end), source]);
}
"""


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        # several tokens at once, and an end without text
        ([("ab cd", [("model", b"ab"), ("lookup", b" cd"), ("model", b"<|end|>")])], [("ab", "model"), (" cd", "lookup")]),
        # the text is behind its tokens: a character of several, a stop string that might have come
        (
            [("", [("model", b"\xf0\x9f")]), ("🙂", [("lookup", b"\x99\x82")]), ("!", [("draft", b"!")])],
            [("🙂", "model"), ("!", "draft")],
        ),
        # a first blank that the text does not have, a control token within, a damaged character
        ([("a", [("model", b" a")]), ("b", [("lookup", b"<|x|>"), ("memory", b"b")])], [("a", "model"), ("b", "memory")]),
        ([("\ufffdc", [("model", b"\xff"), ("lookup", b"c")])], [("\ufffd", "model"), ("c", "lookup")]),
        # nobody knows where tokens end
        ([("ab", [("draft", None), ("model", None)]), ("c", [("model", None)])], [("ab", ""), ("c", "model")]),
        # held back to the end
        ([("a", [("model", b"a"), ("draft", b"bc")]), ("bc", [])], [("a", "model"), ("bc", "draft")]),
    ],
)
def test_text_finds_its_tokens(modules: Page, chunks: Any, pieces: Any) -> None:
    given = [(text, [(source, spelling and list(spelling)) for source, spelling in tokens]) for text, tokens in chunks]
    assert modules.evaluate(ALIGNED, given) == [list(piece) for piece in pieces]
