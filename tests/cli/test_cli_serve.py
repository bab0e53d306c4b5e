"""The options of `obole serve`: one for each field, with its type, default and errors."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from obole.cli.commands import app
from obole.cli.options import WrongUsage
from obole.cli.serve import SERVER, option_name, server_config
from obole.server.config import FIELDS, ServerConfig

EMPTY = {"api_keys": [], "model_names": []}


def test_every_field_has_an_option():
    assert set(SERVER) == set(FIELDS)
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    for field in FIELDS:
        assert option_name(field) in text


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("OBOLE_API_KEYS", " sk-a, sk-b\nsk-c ")
    assert server_config({**EMPTY, "api_keys": ["sk-0"]}).api_keys == ("sk-0", "sk-a", "sk-b", "sk-c")
    monkeypatch.delenv("OBOLE_API_KEYS")
    assert server_config(EMPTY) == ServerConfig()


def test_errors_speak_of_options():
    with pytest.raises(WrongUsage, match="--drain-seconds must be"):
        server_config({**EMPTY, "drain_seconds": -1.0})
    result = CliRunner().invoke(app, ["serve", "--log-format", "xml"])
    assert result.exit_code == 2
    assert "--log-format must be text or json" in result.output
    result = CliRunner().invoke(app, ["serve", "--body-bytes", "5X"])
    assert result.exit_code == 2
