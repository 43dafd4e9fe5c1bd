"""What a caller passes: it is taken as meant, or refused in a line that names the argument."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import galley
from galley.client.arguments import FORMS, check_names, checked_messages
from galley.client.options import GenerateOptions, Message, Speculation
from galley.client.request import generate_request
from galley.pb.galley.v1 import galley_pb2 as pb

MODES = 'must be "auto", "off" or Speculation(k=…, strategy=…), got'
KINDS = "must be text, messages or token ids, got"
UTF8 = "must be text that UTF-8 can encode, got half of a surrogate pair at character"
OFF, AUTO = (
    pb.GenerateRequest(speculation=pb.Speculation(mode=mode))
    for mode in (pb.Speculation.MODE_OFF, pb.Speculation.MODE_AUTO)
)
HI = pb.ChatMessage(role="user", content="Hi")


def form(**kind: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(structured_output=pb.StructuredOutput(**kind))


def predicted(ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(prediction=pb.Prediction(token_ids=pb.TokenIds(ids=ids)))


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("timeout", "timeout_s"),
        ("response_format", "schema"),
        ("choices", "choice"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(TypeError) as raised:
        check_names("generate", ["seed", given])
    assert str(raised.value) == (
        f"generate() got an unexpected keyword argument '{given}'. Did you mean '{nearest}'?"
    )


def test_an_unlike_option_is_refused_with_the_list() -> None:
    with pytest.raises(TypeError, match=r"argument 'zzz'\. It has .*, temperature, .*"):
        check_names("chat", ["zzz"])


def test_every_option_is_known() -> None:
    check_names("stream", GenerateOptions.__annotations__)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"max_tokens": "16"}, "max_tokens: must be an integer, got '16'"),
        ({"max_tokens": 1.0}, "max_tokens: must be an integer, got 1.0"),
        ({"max_tokens": True}, "max_tokens: must be an integer, got True"),
        ({"max_tokens": -1}, "max_tokens: must be in [0, 4294967295], got -1"),
        ({"seed": 2**64}, f"seed: must be in [0, {2**64 - 1}], got {2**64}"),
        ({"seed": -1}, f"seed: must be in [0, {2**64 - 1}], got -1"),
        ({"priority": 2**31}, f"priority: must be in [{-(2**31)}, {2**31 - 1}], got {2**31}"),
        ({"temperature": "0"}, "temperature: must be a number, got '0'"),
        ({"temperature": False}, "temperature: must be a number, got False"),
        ({"stop": b"x"}, "stop: must be text or a list of texts, got b'x'"),
        ({"stop": 5}, "stop: must be text or a list of texts, got 5"),
        ({"stop": ["a", b"b"]}, "stop[1]: must be text, got bytes"),
        ({"stop": ["\ud800"]}, f"stop[0]: {UTF8} 0"),
        ({"stop_token_ids": "12"}, "stop_token_ids: must be a list of token ids, got '12'"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]: must be an integer, got '2'"),
        ({"logit_bias": [1]}, "logit_bias: must map token ids to numbers, got [1]"),
        ({"logit_bias": {"50256": -100}}, "logit_bias key: must be an integer, got '50256'"),
        ({"logit_bias": {7: "no"}}, "logit_bias[7]: must be a number, got 'no'"),
        ({"ignore_eos": 1}, "ignore_eos: must be True or False, got 1"),
        ({"speculation": "ngram"}, f"speculation: {MODES} 'ngram'"),
        ({"speculation": False}, f"speculation: {MODES} False"),
        ({"speculation": Speculation(k=-1)}, "speculation.k: must be in [0, 4294967295], got -1"),
        ({"speculation": Speculation(width=-1)}, "speculation.width: must be in [0, 4294967295], got -1"),
        ({"speculation": Speculation(strategy=3)}, "speculation.strategy: must be text, got int"),  # type: ignore[arg-type]
        ({"speculation": Speculation(off="yes")}, "speculation.off: must be True or False, got 'yes'"),  # type: ignore[arg-type]
        ({"workload": b"chat"}, "workload: must be text, got bytes"),
        ({"timeout_s": 0}, "timeout_s: must be a finite time above 0, in seconds, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s: must be a finite time above 0, in seconds, got nan"),
        ({"schema": "{}"}, "schema: must be a dict or a pydantic model, got str"),
        ({"schema": dict}, "schema: must be a dict or a pydantic model, got the class dict"),
        ({"schema": {"const": {1}}}, "schema: must be JSON: Object of type set is not JSON serializable"),
        ({"schema": {"const": "\ud800"}}, f"schema: {UTF8} 11"),
        ({"regex": 5}, "regex: must be text, got int"),
        ({"choice": "yes"}, "choice: must be a list of texts, got 'yes'"),
        ({"choice": ["yes", 1]}, "choice[1]: must be text, got int"),
        ({"grammar": ["start: 'a'"]}, "grammar: must be text, got list"),
        ({"structural_tag": 5}, "structural_tag: must be a dict or JSON, got int"),
        ({"regex": "a", "schema": {}}, "regex: cannot be combined with schema"),
        ({"choice": [], "grammar": ""}, "grammar: cannot be combined with choice"),
        ({"prediction": 5}, "prediction: must be a list of token ids, got 5"),
        ({"prediction": [1, "b"]}, "prediction[1]: must be an integer, got 'b'"),
        ({"prediction": "\ud800"}, f"prediction: {UTF8} 0"),
        ({"model": list("x" * 99)}, "model: must be text, got list"),
        ({"max_tokens": "x" * 99}, f"max_tokens: must be an integer, got '{'x' * 59}… (str)"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_refused(option: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        generate_request("x", option)
    assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("option", "request_"),
    [
        ({"stop": "END"}, pb.GenerateRequest(stop=["END"])),
        ({"stop": ("a", "b")}, pb.GenerateRequest(stop=["a", "b"])),
        ({"max_tokens": np.int64(3)}, pb.GenerateRequest(max_tokens=3)),
        ({"stop_token_ids": np.array([1, 2])}, pb.GenerateRequest(stop_token_ids=[1, 2])),
        ({"temperature": np.float32(0.5)}, pb.GenerateRequest(sampling=pb.SamplingParams(temperature=0.5))),
        ({"temperature": 0}, pb.GenerateRequest(sampling=pb.SamplingParams(temperature=0))),
        ({"speculation": "off"}, OFF),
        ({"speculation": "auto"}, AUTO),
        ({"stop": None, "seed": None}, pb.GenerateRequest()),
        (dict.fromkeys((*FORMS, "prediction")), pb.GenerateRequest()),
        ({"schema": {"b": "ä", "a": 1}}, form(json_schema='{"b": "ä", "a": 1}')),
        ({"schema": {}}, form(json_schema="{}")),
        ({"regex": ""}, form(regex="")),
        ({"grammar": "start: /a/"}, form(grammar="start: /a/")),
        ({"structural_tag": {"format": {}}}, form(structural_tag='{"format": {}}')),
        ({"structural_tag": "{}"}, form(structural_tag="{}")),
        ({"choice": ("a", "b")}, form(choice=pb.Choices(choices=["a", "b"]))),
        ({"choice": []}, form(choice=pb.Choices())),
        ({"prediction": "x = 1"}, pb.GenerateRequest(prediction=pb.Prediction(text="x = 1"))),
        ({"prediction": np.array([1, 2])}, predicted([1, 2])),
        ({"prediction": []}, predicted([])),
    ],
)  # fmt: skip
def test_a_value_is_taken_as_meant(option: dict[str, Any], request_: pb.GenerateRequest) -> None:
    expected = pb.GenerateRequest(
        text="x",
        sampling=pb.SamplingParams(),
        speculation=pb.Speculation(mode=pb.Speculation.MODE_AUTO),
        use_default_sampling=True,
    )
    expected.MergeFrom(request_)
    assert generate_request("x", option) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", pb.GenerateRequest(text="Hi")),
        ([1, 2], pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        (np.array([1, 2]), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        (range(2), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0, 1]))),
        ([], pb.GenerateRequest(token_ids=pb.TokenIds())),
        ([Message("user", "Hi")], pb.GenerateRequest(messages=pb.ChatMessages(messages=[HI]))),
        ([{"role": "user", "content": "Hi"}], pb.GenerateRequest(messages=pb.ChatMessages(messages=[HI]))),
        (
            [{"role": "user", "content": "Hi", "name": None}, Message("user", "Hi")],
            pb.GenerateRequest(messages=pb.ChatMessages(messages=[HI, HI])),
        ),
    ],
    ids=repr,
)
def test_a_prompt_is_text_messages_or_token_ids(prompt: Any, expected: pb.GenerateRequest) -> None:
    request = generate_request(prompt, {})
    assert request.WhichOneof("input") == expected.WhichOneof("input")
    for name in ("text", "messages", "token_ids"):
        assert getattr(request, name) == getattr(expected, name)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, f"prompt: {KINDS} None"),
        (5, f"prompt: {KINDS} int"),
        (b"Hi", f"prompt: {KINDS} bytes"),
        (["Hi", "there"], "prompt[0]: must be a message or a token id, got str"),
        ([1, 2.5], "prompt[1]: must be a message or a token id, got float"),
        ([1, True], "prompt[1]: must be a message or a token id, got bool"),
        ([1, -1], "prompt[1]: must be in [0, 4294967295], got -1"),
        ([Message("user", "x"), 1], f"prompt: {KINDS} messages and token ids"),
        (Message("user", "Hi"), "prompt: must be a list of messages, got one message"),
        ({"role": "user", "content": "Hi"}, "prompt: must be a list of messages, got one message"),
        ([{"role": "user"}], "prompt[0]: must have content, got {'role': 'user'}"),
        ([{"content": "Hi"}], "prompt[0]: must have role, got {'content': 'Hi'}"),
        ([Message("user", "Hi"), {}], "prompt[1]: must have role, got {}"),
        ([{"role": "x", "content": "y", "n": 1}], "prompt[0]: must have role and content only, got 'n'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt[0].content: must be text, got list"),
        ([Message("user", b"Hi")], "prompt[0].content: must be text, got bytes"),  # type: ignore[arg-type]
        ([Message("user", None)], "prompt[0]: must have content, got {'role': 'user', 'content': None}"),  # type: ignore[arg-type]
        ("a\udfff", f"prompt: {UTF8} 1"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_prompt_that_cannot_be_meant_is_refused(prompt: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        generate_request(prompt, {})
    assert str(raised.value) == problem


def test_a_schema_with_a_number_that_json_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^schema: must be JSON: "):
        generate_request("x", {"schema": {"const": float("nan")}})


def test_text_is_a_message_of_the_user_in_chat() -> None:
    assert checked_messages("Hi") == [Message("user", "Hi")]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages: must be at least one message, or the text of one, got none"),
        ([1, 2], "messages: must be at least one message, or the text of one, got token ids"),
        ([{"role": "user"}], "messages[0]: must have content, got {'role': 'user'}"),
    ],
)
def test_chat_refuses_what_is_no_conversation(messages: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        checked_messages(messages)
    assert str(raised.value) == problem


@pytest.mark.parametrize("kind", [galley.Client, galley.AsyncClient])
@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_help_and_completion_show_every_option(kind: type, method: str) -> None:
    parameters = inspect.signature(getattr(kind, method)).parameters
    assert list(parameters)[2:] == list(GenerateOptions.__annotations__)
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in list(parameters.values())[2:])
    assert inspect.iscoroutinefunction(getattr(kind, method)) == (
        kind is galley.AsyncClient and method != "stream"
    )


@pytest.mark.parametrize("kind", [galley.Client, galley.AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"addresses": 50051}, "addresses: must be HOST:PORT, or several, got int"),
        ({"addresses": ""}, "addresses: must name at least one gateway, HOST:PORT"),
        ({"retries": 3}, "retries: must be Retries(patience_s=…), got int"),
        ({"tls": True}, "tls: must be Tls(ca_file=…), got bool"),
        ({"api_key": b"secret"}, "api_key: must be text, or a function that returns it, got bytes"),
    ],
)
def test_a_client_refuses_arguments_of_another_type(
    kind: Any, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        kind(**{"addresses": "127.0.0.1:1", **arguments})
    assert str(raised.value) == problem
