"""Renders chat templates in a process of its own: `python -m obole.text.template_worker`.

A template is a program out of a model file. The immutable sandbox of jinja2 keeps it away from Python's insides; the
limits of a process bound what a sandbox cannot: memory, time, files. One JSON object per line in, one out:
{"number", "template", "context", "seconds", "characters"} -> {"number", "text"} or {"number", "error", "message"}, where
number is that of the request, and error is "template" (does not compile), "hostile" (breaks a limit or the sandbox),
"raised" (`raise_exception`) or "render".
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug  # loaded before files are out of reach
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 1 << 29  # bytes of address space
WARM_UP = r"{%- set x = '\n' ~ 1.5 -%}{{ x | trim | length }}{{ x.strip() }}{{ [x, {'a': x}] | tojson | pprint }}{{ y.z }}"


class Raised(TemplateError):
    """The template refused its input with `raise_exception`."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; it renders as what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class DictMaker:
    """`dict` without the type object behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class SafeNamespace(Namespace):
    """A namespace without underscore attributes, through which jinja2 could be reached."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: object) -> None:
    raise Raised(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML characters, which models have never seen
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates (`apply_chat_template`)."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": DictMaker(), "namespace": SafeNamespace}
    return made


def render(compiled: jinja2.Template, context: dict[str, Any], characters: int) -> dict[str, str]:
    parts: list[str] = []
    size = 0
    try:
        for part in compiled.generate(**context):
            size += len(part)
            if size > characters:
                return {"error": "hostile", "message": f"it wrote more than {characters} characters"}
            parts.append(part)
    except Raised as error:
        return {"error": "raised", "message": str(error)[:1000]}
    except SecurityError as error:
        return {"error": "hostile", "message": str(error)[:1000]}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"error": "hostile", "message": f"it needed too much ({type(error).__name__})"}
    except Exception as error:  # whatever a template can bring about
        return {"error": "render", "message": f"{type(error).__name__}: {error}"[:1000]}
    return {"text": "".join(parts)}


def answer(request: dict[str, Any], compile_template: Callable[[str], jinja2.Template]) -> dict[str, str]:
    try:
        compiled = compile_template(request["template"])
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"error": "hostile", "message": f"it needed too much to compile ({type(error).__name__})"}
    except Exception as error:  # syntax errors, and what constant folding brings about
        return {"error": "template", "message": f"{type(error).__name__}: {error}"[:1000]}
    return render(compiled, request["context"], request["characters"])


def confine() -> None:
    """Give up what rendering does not need."""
    time.localtime()  # reads the time zone while files can still be opened
    _now("%d %b %Y")
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # no new descriptors: no files, sockets, pipes; those that are open stay
    ):
        with contextlib.suppress(OSError, ValueError):  # a lower limit is in force already
            resource.setrlimit(limit, (value, value))


def main() -> None:
    made = environment()
    compile_template = lru_cache(maxsize=8)(made.from_string)
    answer({"template": WARM_UP, "context": {}, "characters": 9}, compile_template)  # loads what is loaded late
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an overrun ends the process, even inside one long C call
    confine()
    sys.stdout.write("{}\n")  # ready
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        number = {"number": request["number"]}
        try:
            reply = json.dumps(number | answer(request, compile_template))
        except MemoryError:
            reply = json.dumps(number | {"error": "hostile", "message": "it needed too much memory"})
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
