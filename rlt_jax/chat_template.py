"""Renders a chat template the way Hugging Face does: Jinja, sandboxed, with the same helpers."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from rlt_jax.validation import fail


class ChatTemplate:
    """A compiled template. Everything that can go wrong in it is a ValueError."""

    def __init__(self, source: str):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        check_messages(messages)
        values = {"tools": None, "documents": None, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except Exception as error:  # the template is foreign code
            raise ValueError(f"chat template: {error}") from error


def check_messages(messages: object, name: str = "messages") -> None:
    """Refuses anything but a non-empty list of {"role": str, "content": ...} objects.

    Content is a string, a list of {"type": ...} parts, or None beside tool calls.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        fail(name, messages, "must be a non-empty list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            fail(f"{name}[{i}]", message, "must be an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            fail(f"{name}[{i}].role", role, "must be a non-empty string")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            for j, part in enumerate(content):
                if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                    fail(f"{name}[{i}].content[{j}]", part, "must be an object with a type")
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            fail(f"{name}[{i}].content", content, "must be a string or a list of parts")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML characters, which would change prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
