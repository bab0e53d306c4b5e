"""The page at /: its files, their types, and what the browser is told about them. `test_page_browser.py` uses it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx
import pytest

from obole.server import page

from .conftest import Serve


@pytest.fixture
def client(serve_speaking: Serve) -> httpx.Client:
    return serve_speaking(["Hello"], api_keys=("secret",)).client  # the page itself needs no key


class Links(HTMLParser):
    """What a page refers to, and what is written into it that its policy would not let run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href") and value and not value.startswith("#"):
                self.found.append(value)
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")
        if tag == "style" or (tag == "script" and not dict(attributes).get("src")):
            self.inline.append(tag)


def test_the_page(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    links = Links()
    links.feed(response.text)
    assert not links.inline
    assert {"page/app.js", "page/style.css", "page/icon.svg"} <= set(links.found)
    for link in links.found:
        assert client.get("/" + link).status_code == 200, link


def test_files(client: httpx.Client) -> None:
    kinds = {"app.js": "text/javascript; charset=utf-8", "style.css": "text/css; charset=utf-8", "icon.svg": "image/svg+xml"}
    assert {name: client.get(f"/page/{name}").headers["content-type"] for name in kinds} == kinds
    for path in ("nothing.js", "..%2fpage.py", "../page.py", "%2e%2e/page.py"):
        response = client.get(f"/page/{path}")
        assert response.status_code == 404
        assert response.json()["error"]["message"].startswith("There is nothing at /")


def test_every_module_is_there() -> None:
    modules = {name for name in page.ASSETS if name.endswith(".js")}
    for name in modules:
        imported = set(re.findall(r'from "\./([^"]+)"', page.ASSETS[name].content.decode()))
        assert imported <= modules, name


def test_browsers_keep_files_until_they_change(client: httpx.Client) -> None:
    first = client.get("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get("/page/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert client.get("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_nothing_comes_from_outside_and_text_stays_text() -> None:
    for name, asset in page.ASSETS.items():
        text = asset.content.decode()
        assert not re.search(r"(?<!xmlns=\")https?://", text), name
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, name
