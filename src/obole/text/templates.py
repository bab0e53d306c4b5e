"""Chat templates: from messages to token ids.

Templates come out of model files and are not trusted (`template_worker`). Messages come from users, and their text
never becomes a control token, nor part of one: what could is hidden from the template and encoded as plain text (`shield`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from obole.errors import InvalidRequest, ModelError
from obole.text.added_tokens import AddedTokenMatcher
from obole.text.folder_tokenizer import read_json
from obole.text.messages import checked_messages, plain_data
from obole.text.shield import ROLES, Hazards, Shield, made_by_template
from obole.text.template_process import TemplateProcess
from obole.text.tokenizer import Tokenizer


class ChatTemplate:
    """The chat template of a model. Safe to use from several threads.

    `source`: the template, or several by name ("default", "tool_use"), or None if the model has none.
    `process`: where templates are rendered; by default one of its own, started when first needed.

    Control tokens (`Tokenizer.special_ids`) count only if the template writes them: in messages, tools and other
    arguments they are plain text, and so are parts of them that text of the template would complete. So are the other
    added tokens that the template itself writes (`<tool_call>`), except in the messages of the assistant: these come from
    the model, and templates look into them for such markers.
    """

    def __init__(
        self, source: str | Mapping[str, str] | None, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> None:
        self._sources: dict[str, str] = {"default": source} if isinstance(source, str) else dict(source or {})
        self._tokenizer = tokenizer
        self._process = TemplateProcess() if process is None else process
        control = [token for token in tokenizer.added if token.control]
        self._control = AddedTokenMatcher(control)
        self._hazards: dict[str, tuple[Hazards, Hazards]] = {}  # of a template: in general, and in the assistant's messages
        for written in self._sources.values():
            markers = [token for token in tokenizer.added if not token.control and token.text.strip() and token.text in written]
            self._hazards[written] = (
                Hazards(written, [*control, *markers], tokenizer.added),
                Hazards(written, control, tokenizer.added),
            )
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        names |= {"unk_token": tokenizer.unk_id, "pad_token": tokenizer.pad_id}
        self._names = {name: tokenizer.token_text(i) for name, i in names.items() if i is not None}

    def __bool__(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._sources)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, with one beginning-of-sequence token if the model wants one.

        Equal to `apply_chat_template(tokenize=True)` of transformers where no message holds the text of a control token.
        Raises `InvalidRequest` (field "messages") for messages that are malformed, that the template refuses, or from
        which it makes a control token that it does not have, and `ModelError` for a template that does not compile or
        breaks its limits.
        """
        pieces = self._pieces(messages, add_generation_prompt, tools, kwargs)
        if len(pieces) == 1:
            return self._tokenizer.encode(pieces[0][0], special=True, bos=True)
        return self._tokenizer.with_bos(self._tokenizer.encode_pieces(pieces))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, to look at: encoding it again would not keep users' text apart. Raises as `encode`."""
        return "".join(text for text, _ in self._pieces(messages, add_generation_prompt, tools, kwargs))

    def close(self) -> None:
        """Stop the rendering process; it starts again if needed."""
        self._process.close()

    def _pieces(
        self, messages: object, add_generation_prompt: bool, tools: object, kwargs: dict[str, Any]
    ) -> list[tuple[str, bool]]:
        checked = checked_messages(messages)
        if tools is not None and (not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools)):
            raise InvalidRequest("tools", "tools must be a list of objects.")
        source = self.source(with_tools=bool(tools))
        shield = Shield()
        general, own = self._hazards[source]
        arguments: dict[str, Any] = plain_data(kwargs, "chat template arguments")
        context = {
            **self._names,
            "documents": None,
            **{name: shield.hide(value, general) for name, value in arguments.items()},
            "messages": [shield.hide_message(m, own if m["role"] == "assistant" else general) for m in checked],
            "tools": shield.hide(plain_data(tools, "tools"), general) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces = shield.pieces(self._process.render(source, context))
        self._check_tokens(pieces, source, ROLES.intersection(m["role"] for m in checked))
        return pieces

    def _check_tokens(self, pieces: list[tuple[str, bool]], source: str, roles: frozenset[str]) -> None:
        """Refuse control tokens that the template does not have: somebody's text must be in them."""
        found = {token.text for text, hidden in pieces if not hidden for _, _, token in self._control.find(text)}
        named = {text for name, text in self._names.items() if name in source}
        for token in sorted(found - named):
            if not made_by_template(token, source, roles):
                raise InvalidRequest(
                    "messages",
                    f"These messages make the model's chat template write {token!r}, a control token that it does not have: "
                    "change the roles and names in them.",
                )

    def source(self, *, with_tools: bool) -> str:
        """The template's own text: the one for tools where there is one and they are given."""
        if not self._sources:
            raise InvalidRequest(
                "messages", "This model has no chat template, it only continues text: give it a plain prompt (--raw)."
            )
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self._sources:
                return self._sources[name]
        raise ModelError(f"The model has no default chat template, only {', '.join(sorted(self._sources))}.")


def chat_templates_from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a GGUF file by name; empty if there are none. Raises `ModelError`."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            found[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = _source_text(value, key)
    return found


def chat_templates_from_folder(path: Path) -> dict[str, str]:
    """The chat templates of a checkpoint folder by name; empty if there are none. Raises `ModelError`.

    `chat_template.jinja` and `additional_chat_templates/*.jinja` go before the entry in `tokenizer_config.json`.
    """
    found: dict[str, str] = {}
    entry = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(entry, list):
        for item in entry:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise ModelError(f"{path / 'tokenizer_config.json'}: chat_template must be a list of named templates.")
            found[item["name"]] = _source_text(item.get("template"), "chat_template")
    elif entry is not None:
        found["default"] = _source_text(entry, "chat_template")
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                found[name] = file.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"{file} cannot be read ({error}): fetch the file again.") from error
    return found


def _source_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ModelError(f"{name} must be text, not {type(value).__name__}.")
    return value
