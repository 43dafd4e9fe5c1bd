"""The commands of `galley chat`: lines that begin with a slash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from galley.cli.chat.conversation import Conversation, Totals
from galley.client.options import GenerateOptions, Speculation
from galley.common.models.sampling_defaults import RECOMMENDED_SAMPLING
from galley.core.errors import InvalidField, check_range
from galley.core.sampling_params import SamplingParams
from galley.core.trees import MAX_WIDTH

_PENALTIES = ("frequency_penalty", "presence_penalty")
_SAMPLING = (*RECOMMENDED_SAMPLING, *_PENALTIES, "seed")
_NUMBERS = (*_SAMPLING, "max_tokens", "min_tokens", "logprobs")
# Options whose zero is not their default.
_ZERO_COUNTS = {*RECOMMENDED_SAMPLING, "seed", "logprobs"}
_TEXTS = ("stop", "workload", "lora")
_SPECULATION = ("speculation", "k", "width", "strategy")
_SWITCHES = {"on": True, "off": False}


class BadCommand(Exception):
    """A command that cannot be obeyed; the message says why, in one line."""


@dataclass(slots=True)
class Chat:
    """The state of a chat. `to_send` is a message that a command asks to send; `is_over` ends the chat."""

    conversation: Conversation
    options: GenerateOptions
    default_sampling: Callable[[], Mapping[str, float]]
    origins: bool = False
    stats: bool = False
    has_set: bool = False
    """True once an option was set, which may differ from its flag."""
    totals: Totals = field(default_factory=Totals)
    to_send: str = ""
    is_over: bool = False
    has_failed: bool = False
    """True once a line was refused or an answer failed."""


def obey(chat: Chat, line: str) -> str:
    """Obey a line that begins with a slash; return what to print. Raises BadCommand."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise BadCommand(f"/{name}: unknown command; /help lists them, // sends a message that begins with /")
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> str:  # noqa: ARG001  # as all commands
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values()]
    keys = "Enter sends. Alt-Enter or Ctrl-J begins a new line. Ctrl-C stops an answer. Ctrl-D ends the chat."
    return "\n".join([*lines, keys])


def _reset(chat: Chat, argument: str) -> str:  # noqa: ARG001
    chat.conversation.reset()
    return "the conversation is empty"


def _undo(chat: Chat, argument: str) -> str:  # noqa: ARG001
    if not chat.conversation.undo():
        raise BadCommand("/undo: there is no message to remove")
    return f"removed the last message; {len(chat.conversation.turns)} left"


def _retry(chat: Chat, argument: str) -> str:  # noqa: ARG001
    chat.to_send = chat.conversation.undo()
    if not chat.to_send:
        raise BadCommand("/retry: there is no message to send again")
    return ""


def _system(chat: Chat, argument: str) -> str:
    if argument:
        chat.conversation.system = "" if argument == '""' else argument
    return f"system message: {chat.conversation.system or 'none'}"


def _set(chat: Chat, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if not name:
        return _settings(chat)
    value = value.strip()
    if name in {"origins", "stats"}:
        setattr(chat, name, _switch(name, value))
    elif name in _SPECULATION:
        chat.options["speculation"] = _checked("speculation", _speculation(chat, name, value))
    elif name in _NUMBERS or name in _TEXTS:
        _set_option(chat, name, value)
    else:
        known = ", ".join((*_NUMBERS, *_TEXTS, *_SPECULATION, "origins", "stats"))
        raise BadCommand(f"/set: must name one of {known}, got {name}")
    chat.has_set = True
    return f"{name}: {value or 'default'}"


def _set_option(chat: Chat, name: str, value: str) -> None:
    options = cast("dict[str, Any]", chat.options)
    if value:
        options[name] = _checked(name, _number(value) if name in _NUMBERS else value)
    else:
        options.pop(name, None)


def _switch(name: str, value: str) -> bool:
    if value not in _SWITCHES:
        raise BadCommand(f"{name}: must be on or off, got {value or 'nothing'}")
    return _SWITCHES[value]


def _speculation(chat: Chat, name: str, value: str) -> object:
    current = chat.options.get("speculation")
    chosen = current if isinstance(current, Speculation) else Speculation()
    if name == "speculation":
        return {"": Speculation(), "auto": Speculation(), "off": Speculation(off=True)}.get(value, value)
    if name == "strategy":
        return replace(chosen, off=False, strategy=value)
    number = cast("int", _number(value)) if value else None
    return replace(chosen, off=False, k=number) if name == "k" else replace(chosen, off=False, width=number)


def _number(value: str) -> object:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _checked(name: str, value: object) -> Any:
    from galley.client.arguments import checked_options  # noqa: PLC0415  # only here

    try:
        checked = checked_options({name: value})[name]
        if name in _SAMPLING:
            SamplingParams(**{name: checked}).validate(vocab_size=0)
        if isinstance(checked, Speculation) and checked.width is not None:
            check_range("speculation.width", checked.width, least=1, most=MAX_WIDTH)
    except InvalidField as error:
        raise BadCommand(f"{error.field.removeprefix('sampling.')}: {error.problem}") from None
    except (TypeError, ValueError) as error:
        raise BadCommand(str(error)) from None
    return checked


def _settings(chat: Chat) -> str:
    given = {name: value for name, value in chat.options.items() if value is not None}
    defaults = chat.default_sampling()
    lines = []
    for name in (*_NUMBERS, *_TEXTS):
        value = given.get(name)
        if value or (value is not None and name in _ZERO_COUNTS):
            lines.append(f"{name}: {value:g}" if isinstance(value, float) else f"{name}: {value}")
        elif name in RECOMMENDED_SAMPLING:
            lines.append(
                f"{name}: {defaults[name]:g} (the model's)" if name in defaults else f"{name}: default"
            )
    speculation = given.get("speculation")
    if isinstance(speculation, Speculation):
        mode = "off" if speculation.off else "auto" if speculation == Speculation() else "fixed"
        k = "" if speculation.k is None else f", k {speculation.k}"
        width = "" if speculation.width is None else f", width {speculation.width}"
        strategy = f", strategy {speculation.strategy}" if speculation.strategy else ""
        lines.append(f"speculation: {mode}{k}{width}{strategy}")
    lines += [f"{name}: {'on' if getattr(chat, name) else 'off'}" for name in ("origins", "stats")]
    return "\n".join(lines)


def _save(chat: Chat, argument: str) -> str:
    if not argument:
        raise BadCommand("/save: must name a file")
    messages = [{"role": one.role, "content": one.content} for one in chat.conversation.messages()]
    try:
        with open(Path(argument).expanduser(), "x", encoding="utf-8", opener=_private) as file:
            json.dump(messages, file, indent=1, ensure_ascii=False)
            file.write("\n")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadCommand(f"/save: {argument}: cannot be written: {reason}") from None
    return f"wrote {len(messages)} messages to {argument}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _stats(chat: Chat, argument: str) -> str:  # noqa: ARG001
    return chat.totals.line()


def _quit(chat: Chat, argument: str) -> str:  # noqa: ARG001
    chat.is_over = True
    return ""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[Chat, str], str]


COMMANDS = {
    command.usage.split()[0][1:]: command
    for command in (
        Command("/help", "show this list", _help),
        Command("/reset", "forget the conversation", _reset),
        Command("/undo", "remove the last message and its answer", _undo),
        Command("/retry", "ask for the last answer again", _retry),
        Command("/system [TEXT]", 'show or set the system message; "" removes it', _system),
        Command("/set [NAME [VALUE]]", "show the options, set one, or set it back", _set),
        Command("/save FILE", "write the conversation as JSON messages", _save),
        Command("/stats", "show the totals of this chat", _stats),
        Command("/quit", "end the chat", _quit),
    )
}
