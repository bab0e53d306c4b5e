"""Strings on which tokenizers differ, and a way to make many more of them."""

from __future__ import annotations

import random

HAND_MADE = [
    "",
    " ",
    "  ",
    "   three spaces",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "tabs\t\tand\ttabs\t",
    "\t\tif x:\n\t\t\treturn  y\n",
    "line\nline\n\nline\n\n\n\nline",
    "CRLF\r\nCRLF\r\n\r\nend\r",
    " \n \n  \n\t\n x",
    "1 12 123 1234 12345 123456789012345",
    "3.14159e-10, 1,000,000; 0x1F; v1.2.3",
    "٣٤٥ ४५६ ½ ² Ⅷ ①",
    "I'll you'LL we'Ve IT'S don't 'tis 's 'S 'ſ o'clock",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    'for (int i=0;i<n;++i){ a[i]^=b[i]<<3; } // "x"',
    '{"a": [1, 2, {"b": null}]}\n',
    "https://example.org/a/b?c=d&e=%20f#g",
    "你好，世界！今天天气不错。",
    "こんにちは世界。カタカナと漢字 ﾊﾝｶｸ",
    "안녕하세요 세계",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "Привет, мир! Ёлка",
    "ďéíóň Ünïcödé ſtraße ŒUVRE",
    "Cafe\u0301 Café e\u0301\u0302 A\u030a \u1100\u1161",
    "no\u00a0break\u00a0\u00a0space \u2003em\u3000ideographic",
    "zero\u200bwidth\u200djoin\ufeffbom\u00adsoft",
    "👩‍👩‍👧 👍🏽 🇩🇪 🫠 🥹 龜 ❤️",
    "a👍b 👍c\n👍👍👍👍",
    "control \x00 \x01 \x07 \x1b[0m \x7f \x85 end",
    "math ∑∫√ → ⇒ ≠ ≤ · × ÷ ± €£¥",
    "quotes “curly” ‘single’ «guillemets» … — –",
    "______----====****####!!!!????....,,,,",
    "MixedCASEWordsAndcamelCaseAndsnake_case_and-kebab",
    "a" * 200,
    " " * 100,
    "\n" * 70,
    "ab" * 60 + " " + "é" * 40,
    "\u2581 \u2581\u2581 literal marks",
    "<0x41> <0x0A> <unk> </b> <table><tr>\n\n</tr>",
    "𝒳𝓎𝔷 𐍈 \U0001f9d1\u200d\U0001f680 \U000e0067",
]

_PIECES = [
    *(" ", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u3000", "\u200d", "\x00", "\x7f"),
    *("a", "I", "the", "The", "ing", "'ll", "'S", "hello", "World", "foo_bar", "1", "23", "456", "7890", "½", "٣"),
    *("_", "-", ".", "...", ",", "!?", "(", ")", "{", "}", "==", "//", "#", "«", "—", "€"),
    *("é", "e\u0301", "ß", "Ж", "я", "中", "文字", "か", "한", "ไทย", "ا", "ل", "न", "ि", "👍", "🏽", "𝒳"),
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Random joins of pieces that meet badly."""
    draw = random.Random(seed)
    return ["".join(draw.choices(_PIECES, k=draw.randint(1, 30))) for _ in range(count)]
