"""Keys, and what each of their owners sees, has and leaves behind."""

from __future__ import annotations

import json
import stat

import pytest

from obole.errors import ConfigError
from obole.server.auth import Tenants, read_keys, read_secret
from obole.server.config import ServerConfig
from obole.server.errors import ApiError
from obole.server.limits import Limits

from .asking import CHAT, TEXT, answered, chat, refusal, streamed, until, user
from .puppets import open_speaking

PROMPT = user("a prompt that is long enough for several blocks of sixteen tokens each, so that it is cached")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(tmp_path, serve_engine):
    file = tmp_path / "keys"
    file.write_text("# who may come in\nanna sk-anna\n\nsk-nameless  # no label\n")
    lines: list[str] = []
    served = serve_engine(open_speaking(tmp_path, ["one"]), api_keys=("sk-first",), key_file=file, log_format="json")
    served.server.log._write = lines.append
    served.lines = lines
    return served


def test_only_who_has_a_key_is_let_in(keyed):
    client = keyed.client
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        for headers in (
            {},
            bearer("sk-wrong"),
            {"authorization": "Bearer"},
            {"authorization": "sk-first"},
            {"authorization": "Basic sk-first"},
        ):
            response = client.post(path, json={}, headers=headers)
            assert refusal(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/v1/models/puppet", "/version", "/metrics"):
        refusal(client.get(path), 401)
        assert client.get(path, headers=bearer("sk-anna")).status_code == 200
    assert client.get("/health").status_code == 200
    for headers in (bearer("sk-first"), bearer("sk-nameless"), {"x-api-key": "sk-anna"}, {"authorization": "bearer  sk-anna"}):
        assert client.post(CHAT, json={"messages": user()}, headers=headers).status_code == 200
    raw = {"authorization": b"Bearer \xff\xfe"}
    refusal(client.post(CHAT, json={"messages": user()}, headers=raw), 401)


def test_nobody_sees_what_others_have_in_the_cache(keyed):
    def cached(key: str) -> int:
        response = keyed.client.post(CHAT, json={"messages": PROMPT}, headers=bearer(key))
        return answered(response)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("sk-anna"), cached("sk-first"), cached("sk-nameless")] == [0, 0, 0]
    assert all(cached(key) >= 64 for key in ("sk-anna", "sk-first", "sk-nameless"))


def test_nobody_can_choose_a_salt(keyed):
    for field in ("cache_salt", "tenant", "salt"):
        body = {"messages": PROMPT, field: "x"}
        assert refusal(keyed.client.post(CHAT, json=body, headers=bearer("sk-anna")))["param"] == field


def test_the_log_knows_tenants_by_their_labels(keyed):
    keyed.client.post(CHAT, json={"messages": user("secret words")}, headers=bearer("sk-anna"))
    keyed.client.post(CHAT, json={"messages": user()}, headers=bearer("sk-nameless"))
    keyed.client.post(CHAT, json={"messages": user()})
    until(lambda: len(keyed.lines) == 3)
    entries = [json.loads(line) for line in keyed.lines]
    assert [(entry["tenant"], entry["status"]) for entry in entries] == [("anna", 200), ("tenant-2", 200), ("-", 401)]
    assert entries[0]["output_tokens"] == sum(entries[0]["sources"].values()) == 2
    assert entries[0]["prompt_tokens"] > entries[1]["prompt_tokens"]
    parts = entries[0]["queued_seconds"] + entries[0]["prefill_seconds"] + entries[0]["decode_seconds"]
    assert parts <= entries[0]["seconds"] + 1e-4
    assert not any("sk-" in line or "secret words" in line for line in keyed.lines)


def test_metrics_know_tenants_by_their_numbers(keyed):
    for _ in range(2):
        keyed.client.post(CHAT, json={"messages": PROMPT}, headers=bearer("sk-anna"))
    until(lambda: len(keyed.lines) == 2)  # a request is counted when its response is out
    page = keyed.client.get("/metrics", headers=bearer("sk-first")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert values['obole_requests_total{tenant="1"}'] == "2.0"
    assert values['obole_http_requests_total{path="/v1/chat/completions",status="200"}'] == "2.0"
    prompt = float(values["obole_prompt_tokens_total"])
    assert float(values["obole_prefix_cache_queries_total"]) == prompt
    assert prompt / 4 < float(values["obole_prefix_cache_hits_total"]) < prompt / 2
    assert sum(float(value) for name, value in values.items() if name.startswith("obole_generation_tokens_total{")) == 4
    assert values["obole_time_to_first_token_seconds_count"] == values["obole_e2e_request_latency_seconds_count"] == "2.0"
    assert values["obole_inter_token_latency_seconds_count"] in ("2.0", "1.0", "0.0")  # one for each token after the first
    for name in ("queue", "prefill", "decode"):
        assert values[f"obole_request_{name}_time_seconds_count"] == "2.0"
    for name in ("obole_num_requests_running", "obole_num_requests_waiting", "obole_kv_cache_usage_perc"):
        assert values[name] == "0.0"
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert f"obole_spec_decode_{name}_total" in page
    assert "anna" not in page


def test_prompts_are_logged_only_where_asked_for(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, ["one"]), log_prompts=True)
    lines: list[str] = []
    served.server.log._write = lines.append
    chat(served.client, messages=user("secret words"))
    streamed(served.client, TEXT, prompt="plain words", max_tokens=1)
    until(lambda: len(lines) == 2)
    assert "secret words" in lines[0]
    assert "plain words" in lines[1]


def test_key_files(tmp_path):
    file = tmp_path / "keys"
    for text in ("", "# nothing\n", "a b c\n"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_keys((), file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        read_keys((), file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys((), tmp_path / "missing")
    with pytest.raises(ConfigError, match="twice"):
        Tenants([("a", "k"), ("b", "k")], b"secret")


def test_salts_last_as_long_as_their_secret(tmp_path):
    file = tmp_path / "secret"
    keys = [("a", "k"), ("b", "l")]
    salts = [tenant.salt for tenant in Tenants(keys, read_secret(file)).all]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [tenant.salt for tenant in Tenants(keys, read_secret(file)).all] == salts
    assert len(set(salts)) == 2
    assert Tenants(keys, read_secret(None)).all[0].salt not in salts
    assert all(salt != "k" for salt in salts)
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="fewer than"):
        read_secret(file)
    with pytest.raises(ConfigError, match="cannot be used"):
        read_secret(tmp_path / "no" / "such" / "folder")


def test_allowances_fill_up_with_time():
    now = [0.0]
    limits = Limits(ServerConfig(tenant_per_minute=2), clock=lambda: now[0])
    tenant = Tenants([], b"").all[0]
    for _ in range(2):
        limits.enter(tenant).leave()
    with pytest.raises(ApiError) as refused:
        limits.enter(tenant)
    assert refused.value.retry_after == 30.0
    now[0] = 30.0
    limits.enter(tenant).leave()
    with pytest.raises(ApiError):
        limits.enter(tenant)
    now[0] = 1000.0
    for _ in range(2):
        place = limits.enter(tenant)
        place.started()
        place.leave()
        place.leave()
    with pytest.raises(ApiError):
        limits.enter(tenant)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 70000}, {"port": True}, {"max_waiting": 0}, {"body_bytes": 0.5}, {"drain_seconds": -1},
        {"stall_seconds": 0}, {"log_format": "xml"}, {"api_keys": ("",)}, {"api_keys": (" k",)}, {"model_names": ("",)},
        {"temperature": float("nan")}, {"pace": -1}, {"max_choices": 1000},
    ],
)  # fmt: skip
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)
