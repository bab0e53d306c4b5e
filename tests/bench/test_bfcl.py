"""The judgement of the tool-call drill (benchmarks/bfcl.py): what counts as right, cut, refused, wrong, failed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from obole.bench.client import Reply

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bfcl.py"
LINE = {
    "id": "simple_0",
    "question": [[{"role": "user", "content": "Find the area."}]],
    "function": [
        {
            "name": "geometry.area",
            "description": "Of a triangle.",
            "parameters": {
                "type": "dict",
                "properties": {"base": {"type": "float"}, "unit": {"type": "String", "enum": ["cm", "m"]}},
                "required": ["base"],
            },
        }
    ],
}


@pytest.fixture(scope="module")
def bfcl():
    spec = importlib.util.spec_from_file_location("bfcl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bfcl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reply(arguments: str, name: str = "geometry_area", reason: str = "tool_calls", content: str | None = None) -> Reply:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": reason}]})
    return Reply(0.0, 200, [(0.0, body.encode())])


@pytest.mark.parametrize(
    ("answer", "end", "reason"),
    [
        (reply('{"base": 3, "unit": "cm"}'), "right", ""),
        (reply('{"base": 3, "un', reason="length"), "cut", ""),
        (reply('{"unit": "cm"}'), "wrong", "'base' is a required property"),
        (reply('{"base": 3, "unit": "ft"}'), "wrong", "'ft' is not one of"),
        (reply('{"base": 3'), "wrong", "not JSON"),
        (reply('{"base": 3}', name="geometry_volume"), "wrong", "there is no tool"),
        (reply('{"base": 3}', reason="stop"), "wrong", "no calls"),
        (reply('{"base": 3}', content="Here you are."), "wrong", "no calls"),
        (Reply(0.0, 400, [(0.0, b'{"error": {"message": "The keyword is not known."}}')]), "refused", "keyword"),
        (Reply(0.0, 500, [(0.0, b"oh")]), "failed", "500: oh"),
        (Reply(0.0, problem="the server closed the connection"), "failed", "closed"),
    ],
)
def test_judgement(bfcl, answer, end, reason):
    tally = bfcl.Tally()
    case = bfcl.case_of(LINE)
    bfcl.judge(case, answer, tally)
    assert tally.ends == {end: 1}
    assert tally.calls == (answer.status == 200 and end != "cut")
    assert any(reason in told for _, told in tally.reasons) or not reason


def test_cases_have_schemas_and_names_that_the_api_takes(bfcl, tmp_path):
    file = tmp_path / "BFCL_v4_simple.json"
    file.write_text(json.dumps(LINE) + "\n\n" + json.dumps({"id": "multi_turn_0", "question": [[]]}) + "\n")
    [case] = bfcl.cases(file, None)
    body = json.loads(case.body(50))
    [tool] = body["tools"]
    assert tool["function"]["name"] == "geometry_area"
    assert tool["function"]["parameters"]["properties"]["base"] == {"type": "number"}
    assert (body["tool_choice"], body["max_tokens"], body["messages"]) == ("required", 50, LINE["question"][0])
