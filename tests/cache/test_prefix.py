"""Block keys bind everything that the contents depend on, and nothing else."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.cache.prefix import block_key, canonical, extend_keys, group_suffix, root_key

IDENTITY = {
    "weights": "00ff", "kv_dtype": "bfloat16", "layout": 1, "block_size": 16, "rope": None, "adapter": "", "shard": [0, 1],
}  # fmt: skip
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    """Equality that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b)


@given(PLAIN, PLAIN)
def test_canonical_encoding_is_the_same_exactly_for_the_same_data(a, b):
    assert (canonical(a) == canonical(b)) == same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [(["ab", "c"], ["a", "bc"]), ([["a"], "b"], [["a", "b"]]), ({"a": "b"}, ["a", "b"]), (1, "1"), (True, 1), (b"x", "x")],
)
def test_canonical_encoding_does_not_collide_by_concatenation(a, b):
    assert canonical(a) != canonical(b)


def test_canonical_encoding_does_not_depend_on_the_order_of_a_mapping():
    assert canonical(dict(reversed(IDENTITY.items()))) == canonical(IDENTITY)


def test_canonical_encoding_refuses_what_is_not_plain_data():
    with pytest.raises(TypeError, match="plain data"):
        canonical({"weights": object()})


@pytest.mark.parametrize("name", IDENTITY)
def test_a_change_of_any_part_of_the_identity_changes_every_key(name):
    changed = {**IDENTITY, name: "something else"}
    assert root_key(canonical(IDENTITY), "") != root_key(canonical(changed), "")


def test_tenants_have_different_roots():
    roots = {root_key(canonical(IDENTITY), tenant) for tenant in ("", "a", "b", "ab", "\ud800")}
    assert len(roots) == 5


def test_tenant_and_identity_cannot_be_mixed_up():
    assert root_key(b"ab", "c") != root_key(b"a", "bc")


def test_equal_blocks_after_different_beginnings_have_different_keys():
    root = root_key(canonical(IDENTITY), "")
    second = list(range(16))
    assert block_key(block_key(root, [1] * 16), second) != block_key(block_key(root, [2] * 16), second)


def test_tokens_that_read_alike_have_different_keys():
    root = root_key(b"", "")
    blocks = [[1, 23] + [0] * 14, [12, 3] + [0] * 14, [123] + [0] * 15, [0] * 14 + [1, 23], [256] + [0] * 15, [0, 1] + [0] * 14]
    keys = [block_key(root, tokens) for tokens in blocks]
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_groups_have_different_keys():
    assert len({b"key" + group_suffix(g) for g in range(300)}) == 300


def test_keys_are_extended_a_block_at_a_time_or_at_once_to_the_same_end():
    tokens = list(range(100))
    root = root_key(b"", "t")
    at_once: list[bytes] = []
    extend_keys(at_once, root, tokens, 6)
    stepwise: list[bytes] = []
    for count in (1, 1, 3, 6):
        extend_keys(stepwise, root, tokens, count)
    assert stepwise == at_once
    assert len(at_once) == 6


def test_keys_are_the_same_in_another_process():
    code = (
        "from obole.cache.prefix import *; "
        "print(block_key(root_key(canonical({'a': 1, 'b': ['x', None]}), 'tenant'), list(range(16))).hex())"
    )
    here = block_key(root_key(canonical({"b": ["x", None], "a": 1}), "tenant"), list(range(16))).hex()
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert there == here
