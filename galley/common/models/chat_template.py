"""A model's chat template, rendered as transformers renders it but without transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from galley.core.errors import InvalidField

MAX_RENDERED_CHARS = 8 * 1024 * 1024
_MAX_REASON_CHARS = 200
# What a template raises when it is given messages that it was not written for.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


class ChatTemplate:
    """A chat template and, if the model has another for chats with tools, that one.

    `source` and `tools_source` are the model's; `variables` are its special tokens (`bos_token`, ...). They
    are code of a third party: they run in jinja2's immutable sandbox, and what they write is bounded.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        tools_source: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),  # the host's, as transformers
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        self.tools_source = tools_source or source
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self._tools_template = environment.from_string(self.tools_source)
            tree, tools_tree = environment.parse(source), environment.parse(self.tools_source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: line {error.lineno}: {error.message}") from error
        self.takes_tools = "tools" in find_undeclared_variables(tools_tree)
        # Of two templates, only that for tools may write calls.
        self._calls_template = next(
            (
                template
                for template, of in ((self._template, tree), (self._tools_template, tools_tree))
                if _names(of, "tool_calls")
            ),
            None,
        )
        self._variables = dict(variables)
        self._max_chars = max_chars

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render up to where the assistant's answer begins; the template also reads the variables `more`.

        Raise InvalidField("messages") if the template refuses them or writes more than `max_chars`, and
        InvalidField("tools") if it takes none. Raise InvalidField with the name of a turn that it would leave
        out: one with calls, or of role `tool`. The half of a surrogate pair, which only an escape of JSON can
        write, is written as that escape: no tokenizer takes it. A template that does not take a text as the
        arguments of a call gets an empty object instead.
        """
        if tools and not self.takes_tools:
            raise InvalidField("tools", "must be absent: the model's chat template takes no tools")
        template = self._tools_template if tools else self._template_of(messages)
        written = template.generate(
            {
                **more,
                **self._variables,
                "messages": [dict(message) for message in messages],
                "tools": [dict(tool) for tool in tools] or None,
                "documents": None,
                "add_generation_prompt": True,
            }
        )
        prompt = io.StringIO()
        try:
            for piece in written:
                prompt.write(piece)
                if prompt.tell() > self._max_chars:
                    break
        except _REFUSALS as error:
            objects = _with_objects(messages)
            if objects != list(messages):
                return self.render(objects, tools, more)
            reason = str(error)[:_MAX_REASON_CHARS]
            # Logs leave out what follows ", got": a template may quote a message.
            problem = f"the model's chat template refuses them, got its error: {reason}"
            raise InvalidField("messages", problem) from error
        if prompt.tell() > self._max_chars:
            raise InvalidField("messages", f"must come to at most {self._max_chars} characters as a prompt")
        text = prompt.getvalue()
        if self._calls_template is None:
            _check_results(messages, text)
        return text.encode(errors="backslashreplace").decode()

    def _template_of(self, messages: Sequence[Mapping[str, Any]]) -> jinja2.Template:
        """Return the template of a chat without tools. Raise InvalidField if none writes its calls."""
        calling = next((index for index, turn in enumerate(messages) if turn.get("tool_calls")), None)
        if calling is None:
            return self._template
        if self._calls_template is None:
            problem = "must be absent: the model's chat template leaves calls of tools out"
            raise InvalidField(f"messages.messages[{calling}].tool_calls", problem)
        return self._calls_template


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have an empty object in place of arguments that are text."""

    def object_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        is_text = isinstance(function.get("arguments"), str)
        return {**call, "function": {**function, "arguments": {}}} if is_text else call

    return [
        {**turn, "tool_calls": [*map(object_call, turn["tool_calls"])]} if "tool_calls" in turn else turn
        for turn in messages
    ]


def _check_results(messages: Sequence[Mapping[str, Any]], prompt: str) -> None:
    """Raise InvalidField for a turn of role `tool` that is not in the prompt."""
    for index, turn in enumerate(messages):
        if turn.get("role") == "tool" and str(turn.get("content", "")).strip() not in prompt:
            problem = "must not be 'tool': the model's chat template leaves such turns out"
            raise InvalidField(f"messages.messages[{index}].role", problem)


def _names(tree: nodes.Template, name: str) -> bool:
    """Return True if a template reads an attribute or item of this name."""
    return any(one.attr == name for one in tree.find_all(nodes.Getattr)) or any(
        one.value == name for one in tree.find_all(nodes.Const)
    )


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeDict:
    """A `dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _SafeNamespace(Namespace):
    """A `namespace` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=...)` must work
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # called by templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON; jinja's own filter would escape HTML in it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
