"""`obole verify`: matrix, alarm and document, with proofs made up."""

from __future__ import annotations

import json

import pytest

from obole.bench.verification import DRAFTINGS, FULL, QUICK, Difference, Outcome, Proof, Spot, Way

WRONG = Difference("story", 3, Spot(318, " is", -0.25, ((11, -2.5),), ""), Spot(None, "", None, (), "stop"))


def outcomes(*, difference=None, fault=""):
    """Two rows of the matrix, the last cell as given."""
    ways = [Way(DRAFTINGS[1], sampled, bool(i & 4), bool(i & 2), bool(i & 1)) for sampled in (False, True) for i in range(8)]
    *good, last = (Outcome(way, 20, 10, None, "") for way in ways)
    if not difference and not fault:
        return *good, last
    return *good, Outcome(last.way, 0 if fault else 20, 0, difference, fault)


@pytest.fixture
def prove(monkeypatch):
    """Let the proof come out like this; returns what it was asked for."""
    extents = []

    def set_up(**last):
        def verify(_engine, extent, report):
            extents.append(extent)
            report("off, greedy, alone, whole, cold", 0, 16)
            return Proof({"sentence": 26, "story": 60}, extent.output_tokens, outcomes(**last))

        monkeypatch.setattr("obole.bench.verification.verify", verify)
        return extents

    return set_up


def test_a_proof(invoke, prove):
    extents = prove()
    result = invoke("verify", "some-model", "--quick")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fake · reference kernels")
    assert [line.split() for line in lines[2:5]] == [
        ["alone"] * 4 + ["batched"] * 4,
        ["whole", "whole", "chunked", "chunked"] * 2,
        ["drafts", *["cold", "cached"] * 4],
    ]
    assert lines[5].split() == ["auto,", "greedy", *["✓", "10/20"] * 8]
    assert lines[6].split() == ["auto,", "sampled", *["✓", "10/20"] * 8]
    assert "2 prompts of 26 to 60 tokens" in lines[-1]
    assert invoke("verify").exit_code == 0
    assert extents == [QUICK, FULL]


def test_the_first_difference(invoke, prove):
    prove(difference=WRONG)
    result = invoke("verify")
    assert result.exit_code == 1
    assert result.stdout.count("✗ 0/20") == 1
    assert result.stderr == (
        "error: auto, sampled, batched, chunked, cached: the answer to the prompt 'story' differs at token 3: expected token "
        "318 ' is' (log-probability -0.25; 11: -2.5), got the end (stop).\n"
    )


def test_a_way_that_proves_nothing(invoke, prove):
    prove(fault="nothing was drafted")
    result = invoke("verify")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[6].endswith("?")
    assert "proves nothing, since nothing was drafted" in result.stderr


def test_documents(invoke, prove):
    prove()
    document = json.loads(invoke("verify", "--json").stdout)
    assert (document["benchmark"], document["model"], document["proved"], document["first_failure"]) == (
        "verify",
        "fake",
        True,
        None,
    )
    assert document["prompt_tokens"] == {"sentence": 26, "story": 60}
    assert document["ways"][1] == {
        "drafting": "auto", "sampled": False, "batched": False, "chunked": False, "cached": True,
        "drafted": 20, "accepted": 10, "proved": True, "fault": None, "difference": None,
    }  # fmt: skip
    prove(difference=WRONG)
    result = invoke("verify", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    found = json.loads(result.stdout)["first_failure"]
    assert found["cached"]
    assert found["difference"]["position"] == 3
    assert found["difference"]["expected"]["token_id"] == 318
    assert found["difference"]["got"]["ended"] == "stop"
