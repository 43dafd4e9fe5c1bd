"""Chat templates, rendered as transformers renders them but without transformers.

Templates come with a model, so they are code of a third party: they run in jinja2's immutable sandbox, and
what they write is bounded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
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
    """`source` is the model's template; `variables` are its special tokens (`bos_token`, ...)."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),  # the host's, as transformers
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        self._template = _environment(now).from_string(source)
        self._variables = dict(variables)
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render up to where the assistant's answer begins.

        Raise InvalidField("messages") if the template refuses them or writes more than `max_chars`.
        """
        written = self._template.generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._variables,
        )
        prompt = io.StringIO()
        try:
            for piece in written:
                prompt.write(piece)
                if prompt.tell() > self._max_chars:
                    break
        except _REFUSALS as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            raise InvalidField("messages", f"the model's chat template refuses them: {reason}") from error
        if prompt.tell() > self._max_chars:
            raise InvalidField("messages", f"come to more than {self._max_chars} characters as a prompt")
        return prompt.getvalue()


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
    """`dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _SafeNamespace(Namespace):
    """`namespace`, without names that begin with an underscore."""

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
    """Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
