"""The description of the API, and whether the server does what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from obole.server.app import GROUPS

from .asking import CHAT


@pytest.fixture(scope="module")
def document(plain) -> dict:
    return plain.client.get("/openapi.json").json()


def test_every_endpoint_is_described(document):
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {(e.method, e.path.replace(":path", "")) for group in GROUPS for e in group} <= described
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert "500" in operation["responses"]


def test_fields_are_described_with_their_limits(document):
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]
    assert {"minimum": 1, "maximum": 2**63 - 1, "type": "integer"} in chat["properties"]["max_tokens"]["anyOf"]
    assert set(document["paths"][CHAT]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_the_page_is_whole_in_itself(client):
    response = client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http://" not in response.text
    assert "https://" not in response.text


def test_the_server_does_what_the_document_says(plain, tmp_path):
    """Not that it does all of what a schema allows: token ids in range, say, depend on the model."""
    options = ["--phases", "fuzzing", "--max-examples", "6", "--exclude-checks", "positive_data_acceptance"]
    options += ["--seed", "1", "--no-color"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{plain.url}/openapi.json", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    load = plain.server.engine.snapshot()
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
