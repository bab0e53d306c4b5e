"""What followed the last time that a text ended like this: a suffix automaton over token ids, native (csrc/suffix.cpp).

The automaton is that of Blumer et al. 1985 ("The smallest automaton recognizing the subwords of a text"), of several documents
and built online; it is read along another text as in SAM-Decoding (arXiv 2411.10666). Each token appended or read costs
amortised O(1), whatever the length of the match; memory is about 65 bytes a token.

- `SuffixIndex` holds documents and matches the end of the current one against all of them, itself included;
- `Cursor` matches another text against an index, and stays valid while the index grows;
- `Match` is what they find, with the attributes of `reference.Match`. `reference.py` is the specification of all three.

The length of a match is exact. A continuation is always one of an occurrence of the matched suffix. Occurrences are counted,
and the latest noted, for the 16 longest classes of strings that end at each token (a class: strings that end at the same
places); counts of shorter strings are lower bounds, and their "latest" occurrence may be an earlier one. A suffix with more
than 16 branches has the best and 15 or 16 others looked at, and the count of the suffix itself as its total where that is more.

Wrong token ids, negative lengths and a full index (2^31 - 1 states) raise `ValueError`. One thread at a time may use an index
and its cursors; `extend` and `resume` let other threads run meanwhile.
"""

from __future__ import annotations

from obole.errors import ConfigError

try:
    from obole.kernels._native import SuffixCursor as Cursor
    from obole.kernels._native import SuffixIndex
    from obole.kernels._native import SuffixMatch as Match
except ImportError as error:
    raise ConfigError(f"Lookup of drafts needs the native module ({error}): install obole again.") from error

__all__ = ["Cursor", "Match", "SuffixIndex"]
