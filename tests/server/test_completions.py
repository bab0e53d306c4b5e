"""/v1/completions, /tokenize and /detokenize. The model continues letters with the alphabet."""

from __future__ import annotations

import pytest

from .asking import TEXT, answered, reasons, refusal, said, streamed, text


def test_an_answer_and_its_stream(client):
    document = text(client, prompt="abc", max_tokens=4)
    assert document["object"] == "text_completion"
    assert document["choices"] == [{"index": 0, "text": "defg", "logprobs": None, "finish_reason": "length"}]
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 4
    chunks = streamed(client, TEXT, prompt="abc", max_tokens=4)
    assert (said(chunks), reasons(chunks)) == ("defg", ["length"])
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["choices"][0]["text"] == ""


def test_sixteen_tokens_unless_told(client):
    assert text(client, prompt="a")["choices"][0]["text"] == "bcdefghijklmnopq"


@pytest.mark.parametrize("prompt", [["a", "x"], [[97], [120]]])
def test_several_prompts_and_answers(client, prompt):
    document = text(client, prompt=prompt, max_tokens=3, n=2)
    assert [(c["index"], c["text"]) for c in document["choices"]] == [(0, "bcd"), (1, "bcd"), (2, "yza"), (3, "yza")]
    assert document["usage"]["prompt_tokens"] == 2
    assert document["usage"]["completion_tokens"] == 12
    assert len(document["obole"]["receipts"]) == 4
    chunks = streamed(client, TEXT, prompt=prompt, max_tokens=3, n=2)
    assert [said(chunks, i) for i in range(4)] == ["bcd", "bcd", "yza", "yza"]
    assert [reasons(chunks, i) for i in range(4)] == [["length"]] * 4
    assert [i for i, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["usage"] == {**document["usage"], "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]}


def test_token_ids_are_taken_as_they_are(client):
    document = text(client, prompt=[97, 98], max_tokens=2, return_token_ids=True)
    [choice] = document["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("cd", [99, 100], [97, 98])


def test_echo_and_scores(client):
    [choice] = text(client, prompt="ab", max_tokens=2, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert all(-1e-6 < p <= 0 for p in choice["logprobs"]["token_logprobs"][1:])
    [scored] = text(client, prompt="ab", max_tokens=0, echo=True, logprobs=0)["choices"]
    assert (scored["text"], scored["logprobs"]["tokens"], scored["finish_reason"]) == ("ab", ["a", "b"], "length")
    chunks = streamed(client, TEXT, prompt="ab", max_tokens=2, echo=True)
    assert said(chunks) == "abcd"
    assert text(client, prompt=[97, 98], max_tokens=2, echo=True)["choices"][0]["text"] == "abcd"


def test_logprobs_of_a_stream_join_to_those_of_the_whole(client):
    [choice] = text(client, prompt="ab", max_tokens=5, logprobs=2)["choices"]
    chunks = streamed(client, TEXT, prompt="ab", max_tokens=5, logprobs=2)
    for name, values in choice["logprobs"].items():
        assert [v for chunk in chunks for c in chunk["choices"] for v in (c["logprobs"] or {name: []})[name]] == values


def test_tokens_that_are_no_characters_are_spelt_in_bytes(client):
    body = {"prompt": "a", "max_tokens": 8, "logprobs": 0, "response_format": {"type": "regex", "regex": "é🫠"}}
    [choice] = text(client, **body)["choices"]
    assert choice["text"] == "é🫠"
    assert choice["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert choice["logprobs"]["text_offset"][:6] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], ["a", [97]], [97, "a"], [[97], []], None, 5, {}])
def test_empty_and_mixed_prompts_are_refused_as_a_whole(client, prompt):
    error = refusal(client.post(TEXT, json={"prompt": prompt, "max_tokens": 1}))
    assert error["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[-1], [[261_000]], [1.5], [True], [2**63], ["a", 1]])
def test_token_ids_out_of_the_vocabulary_are_refused(client, prompt):
    assert refusal(client.post(TEXT, json={"prompt": prompt, "max_tokens": 1}))["param"].startswith("prompt")
    assert text(client, prompt="a", max_tokens=1)["choices"][0]["text"] == "b"


def test_a_prompt_that_ends_within_a_character_does_not_leak(client):
    half = list("é🫠".encode())[:-1]
    body = {"prompt": half, "max_tokens": 3, "response_format": {"type": "regex", "regex": "xyz"}}
    assert text(client, **body)["choices"][0]["text"] == "xyz"
    assert said(streamed(client, TEXT, **body)) == "xyz"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"stream": True, "echo": True, "logprobs": 1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"prompt": ["a"] * 129}, "prompt"),
    ],
)
def test_what_is_not_done_is_refused_by_name(client, body, param):
    assert refusal(client.post(TEXT, json={"prompt": "a", **body}))["param"] == param


def test_bos_once(serve_engine, tmp_path):
    from obole import Engine

    from .puppets import speaking

    engine = Engine(speaking(tmp_path / "bos.gguf", ["one"], bos=True), kv_device=1 << 22)
    client = serve_engine(engine).client
    bos = 257
    assert answered(client.post("/tokenize", json={"prompt": "ab"}))["tokens"] == [bos, 97, 98]
    assert answered(client.post("/tokenize", json={"prompt": "<|endoftext|>ab"}))["tokens"] == [bos, 97, 98]
    chat = answered(client.post("/tokenize", json={"messages": [{"role": "user", "content": "ab"}]}))["tokens"]
    assert chat.count(bos) == 1
    document = text(client, prompt="", max_tokens=1, return_token_ids=True)
    assert document["choices"][0]["prompt_token_ids"] == [bos]
    given = text(client, prompt=[97], max_tokens=1, return_token_ids=True)["choices"][0]
    assert given["prompt_token_ids"] == [97]


def test_tokens_and_back(client):
    document = answered(client.post("/tokenize", json={"prompt": "né<|im_end|>", "return_token_strs": True}))
    assert document["tokens"] == [*"né".encode(), 259]
    assert document["count"] == len(document["tokens"])
    assert document["token_strs"][-1] == "<|im_end|>"
    back = answered(client.post("/detokenize", json={"tokens": document["tokens"]}))
    assert back == {"prompt": "né"}
    for tokens in ([-1], [2**40], [10**30], ["a"], None):
        assert refusal(client.post("/detokenize", json={"tokens": tokens}))["param"].startswith("tokens")
    assert refusal(client.post("/tokenize", json={}))["param"] == "prompt"
    assert refusal(client.post("/tokenize", json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]}))
    assert refusal(client.post("/tokenize", json={"prompt": ""}))["param"] == "prompt"
