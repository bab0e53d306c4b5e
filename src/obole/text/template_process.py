"""The process in which chat templates are rendered, seen from the engine's side."""

from __future__ import annotations

import json
from typing import Any

from obole.errors import InvalidRequest, ModelError
from obole.text.line_process import LineProcess, ProcessEndedError

_GRACE_SECONDS = 2.0  # the process ends itself at its limit; after this it is ended from outside
_BYTES_PER_CHARACTER = 12  # a character outside the basic plane, escaped as two surrogates in JSON


class TemplateProcess(LineProcess):
    """Renders templates one at a time, in at most `seconds` each; a process that died is started again.

    The text may be `growth` times as long as what goes in, and always 2**20 characters. Safe to use from several threads.
    """

    def __init__(self, seconds: float = 5.0, growth: int = 8) -> None:
        super().__init__("obole.text.template_worker", "chat templates", seconds=seconds, patience=seconds + _GRACE_SECONDS)
        self._growth = growth

    def render(self, template: str, context: dict[str, Any]) -> str:
        """The text of a template. Raises `InvalidRequest` (field "messages") if the template refuses its input or
        fails on it, `ModelError` if it does not compile or breaks a limit."""
        size = len(template) + len(json.dumps(context, ensure_ascii=False))
        characters = max(1 << 20, self._growth * size)
        request = {"template": template, "context": context, "characters": characters}
        try:
            reply = self.ask(request, characters * _BYTES_PER_CHARACTER)
        except ProcessEndedError as ended:
            slow, over = f"it took more than {self._seconds:g} seconds", "it ended the process that rendered it"
            reply = {"error": "hostile", "message": slow if ended.slow else over}
        if "text" in reply:
            return str(reply["text"])
        kind, message = reply.get("error"), reply.get("message")
        if kind == "raised":
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {message}")
        if kind == "render":
            raise InvalidRequest("messages", f"The model's chat template cannot render these messages ({message}).")
        problem = "does not compile" if kind == "template" else "is not safe to run"
        raise ModelError(f"The model's chat template {problem} ({message}): give the model a plain prompt (--raw).")
