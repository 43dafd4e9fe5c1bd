"""Every bound of a request, with the field and the bound named; and what a good one comes to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from galley.common.models.tokenizer import TooManyTokens
from galley.core.answer.answer import SessionSpec
from galley.core.content import block_hashes
from galley.core.errors import InvalidField, UnknownSession
from galley.core.grammar.spec import GrammarSpec
from galley.core.sampling_params import SamplingParams
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.request.grammars import Grammars
from services.gateway.request.validate import (
    Limits,
    Model,
    PromptRefused,
    ResumeSpec,
    adapter_of,
    body_hash,
    parse_generate,
    parse_resume,
    parse_session_id,
    session_id_for,
    tenant_salt_for,
)
from tests.fakes.vocabularies import byte_vocabulary

LIMITS = Limits(default_max_tokens=20, max_text_bytes=200, max_messages=3)
MODEL = Model(
    "m",
    context_window=64,
    vocab_size=300,
    strategies=("model", "ngram"),
    eos_token_ids=(2,),
    default_k=8,
    default_strategy="model",
    compile_grammar=Grammars(byte_vocabulary()).compile,
)
SEED = 2**63 + 1


class Bytes:
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, most_tokens: int) -> list[int]:
        self.calls += 1
        ids = list(text.encode())
        if len(ids) > most_tokens:
            raise TooManyTokens(len(ids))
        return ids

    def encode_output(self, text: str, most_tokens: int) -> list[int]:
        return self.encode(text, most_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most_tokens: int, tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return self.encode(f"{list(tools) or ''}{text}", most_tokens)

    def tokens_of_reasoning(self, prompt: Sequence[int], *, is_chat: bool) -> tuple[int | None, int | None]:
        return (7, 8) if is_chat else (None, 9) if prompt[-1] == ord("<") else (None, None)


def request(**fields: Any) -> pb.GenerateRequest:
    if not fields.keys() & {"text", "messages", "token_ids"}:
        fields["text"] = "abc"
    return pb.GenerateRequest(**fields)


def parse(**fields: Any) -> SessionSpec:
    return parse_generate(request(**fields), LIMITS, Bytes(), MODEL, lambda: SEED)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.SamplingParams(**fields)}


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    made = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return {"messages": pb.ChatMessages(messages=made)}


def ids(*tokens: int) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=tokens)}


def speculation(**fields: Any) -> dict[str, Any]:
    return {"speculation": pb.Speculation(**fields)}


def prediction(**fields: Any) -> dict[str, Any]:
    return {"prediction": pb.Prediction(**fields)}


def test_a_prediction_is_text_or_token_ids() -> None:
    assert parse(**prediction(text="abc")).prediction == tuple(b"abc")
    assert parse(**prediction(token_ids=pb.TokenIds(ids=[7, 0, 299]))).prediction == (7, 0, 299)
    assert parse(**prediction(text="")).prediction == ()
    assert parse(prediction=pb.Prediction()).prediction == ()


def test_tools_and_arguments_of_calls_have_few_values() -> None:
    def parse_values(count: int) -> None:
        """Parse a chat with so many values and names: half of them in a tool, the others in a call."""
        half = json.dumps({"enum": [""] * (count // 2 - 3)})
        turn = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments=half)])
        limits = replace(LIMITS, max_text_bytes=1 << 20)
        messages = pb.ChatMessages(messages=[turn], tools=[half])
        parse_generate(request(messages=messages), limits, tokenizer, MODEL, lambda: SEED)

    tokenizer = Bytes()
    with pytest.raises(InvalidField, match=r"messages: must have at most 32768 values and names"):
        parse_values(32_770)
    before = tokenizer.calls
    with pytest.raises(PromptRefused):
        parse_values(32_768)
    assert (before, tokenizer.calls) == (0, 1)


def test_a_bare_request_gets_the_defaults() -> None:
    assert parse() == SessionSpec(
        session_id="",
        prompt=tuple(b"abc"),
        sampling=SamplingParams(seed=SEED),
        max_position=23,
        vocab_size=300,
        stop_token_ids=frozenset({2}),
        k=8,
        auto=True,
        strategy="model",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_default_sampling": True}, (0.25, 50)),
        ({"use_default_sampling": True, **sampling(temperature=0.0)}, (0.0, 50)),
        ({"use_default_sampling": True, **sampling(top_k=0)}, (0.25, 0)),
        ({}, (1.0, 0)),
    ],
)
def test_the_models_sampling_fills_what_is_unset(fields: dict[str, Any], expected: tuple[float, int]) -> None:
    model = replace(MODEL, default_sampling=pb.SamplingParams(temperature=0.25, top_k=50))
    parsed = parse_generate(request(**fields), LIMITS, Bytes(), model, lambda: SEED).sampling
    assert (parsed.temperature, parsed.top_k) == expected


def test_everything_that_is_set_is_kept() -> None:
    spec = parse(
        model="m",
        **ids(1, 2, 299),
        **sampling(
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            frequency_penalty=-2,
            presence_penalty=2,
            repetition_penalty=10,
            logit_bias={0: -100, 299: 100},
            seed=0,
        ),
        max_tokens=61,
        min_tokens=61,
        stop=["x", "y" * 256, "x"],
        stop_token_ids=[5, 299, 5],
        ignore_eos=True,
        logprobs=0,
        workload="team-a/chat.v1:x_Y",
        **speculation(mode=pb.Speculation.MODE_FIXED, k=0, strategy="ngram"),
        idempotency_key="k" * 256,
        priority=-3,
        n=1,
    )
    assert spec.prompt == (1, 2, 299)
    assert spec.sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        repetition_penalty=10.0,
        logit_bias={0: -100.0, 299: 100.0},
        seed=0,
    )
    assert (spec.max_position, spec.min_tokens) == (64, 61)
    assert spec.stop_strings == ("x", "y" * 256)
    assert spec.stop_token_ids == {5, 299}
    assert spec.logprobs == 0
    assert (spec.k, spec.auto, spec.strategy) == (0, False, "ngram")
    assert (spec.workload, spec.priority) == ("team-a/chat.v1:x_Y", -3)


def test_a_zero_that_is_set_is_not_a_default() -> None:
    assert parse(**sampling(temperature=0)).sampling.temperature == 0.0
    assert parse(**sampling()).sampling.temperature == 1.0
    assert parse(**sampling(seed=0)).sampling.seed == 0
    assert parse(**sampling(repetition_penalty=0.01)).sampling.repetition_penalty < 0.01, "32 bits"
    assert parse(**sampling(top_k=0, min_p=0)).sampling == SamplingParams(seed=SEED)


def test_max_tokens_unset_is_the_default_or_what_fits() -> None:
    assert parse(text="a" * 40).max_position == 60
    assert parse(text="a" * 63).max_position == 64


def test_messages_go_through_the_chat_template() -> None:
    assert bytes(parse(**chat(("user", "hi"))).prompt) == b"user:hi;"
    assert bytes(parse(**chat(("user", ""))).prompt) == b"user:;"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (8, True, "model")),
        ({"mode": pb.Speculation.MODE_AUTO, "k": 3}, (3, True, "model")),
        ({"mode": pb.Speculation.MODE_AUTO, "k": 9, "strategy": "ngram"}, (8, True, "ngram")),
        ({"mode": pb.Speculation.MODE_OFF, "k": 3}, (0, False, "")),
        ({"mode": pb.Speculation.MODE_FIXED}, (4, False, "model")),
        ({"mode": pb.Speculation.MODE_FIXED, "k": 16}, (16, False, "model")),
    ],
)
def test_modes(fields: dict[str, Any], expected: tuple[int, bool, str]) -> None:
    spec = parse(**speculation(**fields))
    assert (spec.k, spec.auto, spec.strategy) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"mode": pb.Speculation.MODE_AUTO, "width": 3}, 3),
        ({"mode": pb.Speculation.MODE_OFF, "width": 3}, 0),
        ({"mode": pb.Speculation.MODE_FIXED}, 0),
        ({"mode": pb.Speculation.MODE_FIXED, "width": 1}, 1),
        ({"mode": pb.Speculation.MODE_FIXED, "width": 8}, 8),
    ],
)
def test_the_width_of_a_mode(fields: dict[str, Any], expected: int) -> None:
    assert parse(**speculation(**fields)).width == expected


REGEX: dict[str, Any] = {"structured_output": {"regex": "a+"}}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_output": {}}, "structured_output", "must have one of json_object"),
    ({"structured_output": {"json_schema": '{"not": {}}'}}, "structured_output.json_schema", '["not"]'),
    ({"structured_output": {"regex": "("}}, "structured_output.regex", "unclosed group"),
    ({"structured_output": {"choice": {"choices": []}}}, "structured_output.choice", "1 to 1000 entries"),
    ({"structured_output": {"grammar": "start: x"}}, "structured_output.grammar", 'unknown name: "x"'),
    ({"structured_output": {"regex": "a", "after_token": 300}}, "structured_output.after_token", "[0, 299]"),
    (
        {"structured_output": {"regex": "a", "opening_token": 3}},
        "structured_output.opening_token",
        "after_token",
    ),
    ({**REGEX, "ignore_eos": True}, "ignore_eos", "must be unset with structured_output"),
    ({**REGEX, "min_tokens": 1}, "min_tokens", "must be unset with structured_output"),
    ({"text": ""}, "text", "empty"),
    ({"text": "a" * 64}, "text", "63 tokens"),
    ({"text": "a" * 201}, "text", "200 bytes"),
    ({"text": "é" * 101}, "text", "200 bytes"),
    (chat(), "messages.messages", "1 to 3"),
    (chat(*[("user", "x")] * 4), "messages.messages", "1 to 3"),
    (chat(("user", "x"), ("", "x")), "messages.messages[1].role", "empty"),
    (chat(("r" * 65, "x")), "messages.messages[0].role", "64 bytes"),
    (chat(("user", "x" * 150), ("user", "x" * 51)), "messages", "200 bytes"),
    (ids(), "token_ids.ids", "empty"),
    (ids(1, 2, 3, 300), "token_ids.ids[3]", "[0, 300)"),
    (ids(2**32 - 1), "token_ids.ids[0]", "[0, 300)"),
    (ids(*[1] * 64), "token_ids", "context window: 64"),
    ({"model": "other"}, "model", "'m'"),
    ({"n": 0}, "n", "must be 1"),
    ({"n": 2}, "n", "must be 1"),
    ({"max_tokens": 0}, "max_tokens", "[1, 63]"),
    ({"max_tokens": 62}, "max_tokens", "<= 61"),
    ({"max_tokens": 2**32 - 1}, "max_tokens", "64"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens (4)"),
    ({"min_tokens": 21}, "min_tokens", "max_tokens (20)"),
    (sampling(temperature=-0.5), "sampling.temperature", ">= 0"),
    (sampling(temperature=math.nan), "sampling.temperature", ">= 0"),
    (sampling(temperature=math.inf), "sampling.temperature", "finite"),
    (sampling(top_p=0), "sampling.top_p", "(0, 1]"),
    (sampling(top_p=1.5), "sampling.top_p", "(0, 1]"),
    (sampling(top_p=math.nan), "sampling.top_p", "(0, 1]"),
    (sampling(min_p=-0.5), "sampling.min_p", "[0, 1]"),
    (sampling(frequency_penalty=2.5), "sampling.frequency_penalty", "[-2, 2]"),
    (sampling(presence_penalty=-2.5), "sampling.presence_penalty", "[-2, 2]"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "[0.01, 10]"),
    (sampling(repetition_penalty=1e-45), "sampling.repetition_penalty", "[0.01, 10]"),
    (sampling(logit_bias={300: 1}), "sampling.logit_bias[300]", "[0, 300)"),
    (sampling(logit_bias={1: 101}), "sampling.logit_bias[1]", "[-100, 100]"),
    (sampling(logit_bias={1: math.nan}), "sampling.logit_bias[1]", "[-100, 100]"),
    (speculation(k=17), "speculation.k", "[0, 16]"),
    (speculation(mode=pb.Speculation.MODE_OFF, k=17), "speculation.k", "[0, 16]"),
    (speculation(width=0), "speculation.width", "[1, 8]"),
    (speculation(mode=pb.Speculation.MODE_OFF, width=9), "speculation.width", "[1, 8]"),
    (speculation(strategy="magic"), "speculation.strategy", "model, ngram"),
    (speculation(mode=9), "speculation.mode", "9"),
    ({"logprobs": 21}, "logprobs", "[0, 20]"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": ["x", ""]}, "stop[1]", "1 to 256 bytes"),
    ({"stop": ["é" * 129]}, "stop[0]", "1 to 256 bytes"),
    ({"stop_token_ids": [1, 300]}, "stop_token_ids[1]", "[0, 300)"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
    ({"idempotency_key": "é" * 129}, "idempotency_key", "256 bytes"),
    ({"workload": "w" * 65}, "workload", "64"),
    ({"workload": "two words"}, "workload", "letters, digits"),
    ({"workload": "line\n"}, "workload", "letters, digits"),
    (prediction(token_ids=pb.TokenIds(ids=[1, 300])), "prediction.token_ids.ids[1]", "[0, 300)"),
    (prediction(token_ids=pb.TokenIds(ids=[1] * 64)), "prediction.token_ids.ids", "at most 63"),
    (prediction(text="é" * 101), "prediction.text", "200 bytes"),
    (prediction(text="a" * 64), "prediction.text", "63 tokens"),
]


NEEDS_THE_PROMPT = ("<= 61", "max_tokens (20)", "63 tokens")


@pytest.mark.parametrize(("fields", "field", "bound"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_with_its_bound(fields: dict[str, Any], field: str, bound: str) -> None:
    tokenizer = Bytes()
    with pytest.raises(InvalidField) as caught:
        parse_generate(request(**fields), LIMITS, tokenizer, MODEL, lambda: SEED)
    assert caught.value.field == field
    assert bound in caught.value.problem
    texts = 2 if field == "prediction.text" else 1  # a prediction comes after its prompt
    assert tokenizer.calls == (texts if bound in NEEDS_THE_PROMPT else 0)


def test_no_input_at_all() -> None:
    with pytest.raises(InvalidField, match="text, messages, token_ids"):
        parse_generate(pb.GenerateRequest(), LIMITS, Bytes(), MODEL, lambda: SEED)


def test_a_grammar_is_compiled_before_the_prompt_is_tokenized() -> None:
    grammar = pb.StructuredOutput(choice=pb.Choices(choices=["a", "b"]), after_token=299, opening_token=0)
    spec = parse(structured_output=grammar, max_tokens=3)
    assert spec.grammar == GrammarSpec("choice", '["a", "b"]', after_token=299, opening_token=0)
    assert parse().grammar is None


def test_a_grammar_begins_after_the_models_reasoning() -> None:
    assert parse(**REGEX).grammar == GrammarSpec("regex", "a+")
    assert parse(**REGEX, text="x<").grammar == GrammarSpec("regex", "a+", after_token=9)
    assert parse(**REGEX, **chat(("user", "x"))).grammar == GrammarSpec("regex", "a+", 8, 7)
    given = {"structured_output": {"regex": "a+", "after_token": 3}}
    assert parse(**given, **chat(("user", "x"))).grammar == GrammarSpec("regex", "a+", after_token=3)


@pytest.mark.parametrize(
    ("tokenizer", "ends", "problem"),
    [("{}", [1], "the tokenizer is not supported"), ("", [], "an end token")],
)
def test_a_model_without_grammars_refuses_them(tokenizer: str, ends: list[int], problem: str) -> None:
    model = replace(MODEL, compile_grammar=Grammars.of_tokenizer(tokenizer, 10, ends).compile)
    with pytest.raises(InvalidField, match=rf"structured_output: must be absent: .*{problem}"):
        parse_generate(request(**REGEX), LIMITS, Bytes(), model, lambda: SEED)


@pytest.mark.parametrize(
    ("field", "tokens", "fields"),
    [
        ("text", 64, {"text": "a" * 64}),
        ("messages", 64, {"messages": {"messages": [pb.ChatMessage(role="u", content="a" * 61)]}}),
        ("token_ids", 64, {"token_ids": {"ids": [1] * 64}}),
        ("max_tokens", 60, {"text": "a" * 60, "max_tokens": 5}),
        ("min_tokens", 60, {"text": "a" * 60, "min_tokens": 5}),
        ("max_tokens", 60, {"text": "a" * 60, "max_tokens": 5, **prediction(text="a" * 50)}),
        ("prediction.text", 3 + 64, prediction(text="a" * 64)),
    ],
)
def test_a_prompt_that_is_refused_tells_its_tokens(field: str, tokens: int, fields: dict[str, Any]) -> None:
    with pytest.raises(PromptRefused) as caught:
        parse(**fields)
    assert (caught.value.field, caught.value.tokens) == (field, tokens)


@pytest.mark.parametrize(
    ("calls", "fields"),
    [
        (0, {"text": ""}),
        (0, {"text": "a" * 201}),
        (0, {"token_ids": {"ids": [300]}}),
        (1, {"text": "a" * 60, "max_tokens": 5}),
    ],
)
def test_a_prediction_is_tokenized_after_all_checks(calls: int, fields: dict[str, Any]) -> None:
    tokenizer = Bytes()
    with pytest.raises(InvalidField):
        parse_generate(request(**prediction(text="a" * 50), **fields), LIMITS, tokenizer, MODEL, lambda: SEED)
    assert tokenizer.calls == calls


def test_a_text_that_comes_to_no_token() -> None:
    class Silent(Bytes):
        def encode(self, text: str, most_tokens: int) -> list[int]:
            return []

    with pytest.raises(InvalidField, match="text: must come to at least one token"):
        parse_generate(request(), LIMITS, Silent(), MODEL, lambda: SEED)


def test_a_long_bad_value_is_not_echoed_whole() -> None:
    with pytest.raises(InvalidField) as caught:
        parse(model="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_the_body_hash_is_of_all_but_the_key() -> None:
    plain = body_hash(request(**sampling(logit_bias={1: 1, 2: 2})))
    keyed = body_hash(request(**sampling(logit_bias={2: 2, 1: 1}), idempotency_key="key"))
    assert plain == keyed
    assert len(plain) == 32
    others: list[dict[str, Any]] = [
        {"text": "abd"},
        {"max_tokens": 20},
        {"priority": 1},
        sampling(temperature=0),
        sampling(temperature=1),
        ids(*b"abc"),
    ]
    hashes = {body_hash(request(**other)) for other in others} | {body_hash(request()), plain}
    assert len(hashes) == len(others) + 2


def test_hashing_leaves_the_request_as_it_was() -> None:
    message = request(idempotency_key="key")
    body_hash(message)
    assert message.idempotency_key == "key"


ID = "0123456789abcdef" * 2


def test_resume() -> None:
    assert parse_resume(pb.ResumeRequest(session_id=ID)) == ResumeSpec(ID, 0, b"")
    message = pb.ResumeRequest(session_id=ID, next_index=7, seen_hash=b"h" * 16)
    assert parse_resume(message) == ResumeSpec(ID, 7, b"h" * 16)
    with pytest.raises(InvalidField, match="seen_hash: must be empty or 16 bytes, got 3 bytes"):
        parse_resume(pb.ResumeRequest(session_id=ID, seen_hash=b"abc"))


@pytest.mark.parametrize("bad", [ID.upper(), ID[1:], ID + "0", "x}{y", ID + "\n", "9" * 10_000])
def test_invalid_session_id_is_unknown(bad: str) -> None:
    with pytest.raises(UnknownSession) as caught:
        parse_session_id(bad)
    assert len(str(caught.value)) < 200


def test_an_empty_session_id_is_a_bad_field() -> None:
    with pytest.raises(InvalidField, match="session_id"):
        parse_resume(pb.ResumeRequest())


def test_principal_and_key_do_not_run_together_in_a_session_id() -> None:
    ids = {session_id_for(*names, b"secret") for names in (("a", "bc"), ("ab", "c"), ("abc", "abc"))}
    assert len(ids) == 3
    assert session_id_for("a", "bc", b"secret") in ids, "a repeat gets the same id"


def test_hashes_in_a_lease_tell_nothing_without_the_id_secret() -> None:
    prompt = list(range(64))
    leased = block_hashes(tenant_salt_for("alice", b"secret"), prompt, 16)
    assert leased == block_hashes(tenant_salt_for("alice", b"secret"), prompt, 16)
    guesses = [b"", b"alice", tenant_salt_for("alice", b"guess"), tenant_salt_for("bob", b"secret")]
    guesses += [bytes.fromhex(session_id_for("alice", key, b"secret")) for key in ("", "alice", "key")]
    for salt in guesses:
        assert not set(leased) & set(block_hashes(salt, prompt, 16))


def test_the_name_of_the_model() -> None:
    assert adapter_of("", MODEL) == adapter_of("m", MODEL) == ""
    with pytest.raises(InvalidField, match="must be 'm' or empty, got 'M'"):
        adapter_of("M", MODEL)


@pytest.mark.parametrize(
    ("fields", "lora"),
    [
        ({}, ""),
        ({"model": "m"}, ""),
        ({"lora": "sql"}, "sql"),
        ({"model": "m", "lora": "sql"}, "sql"),
        ({"model": "sql"}, "sql"),
        ({"model": "m:sql"}, "sql"),
        ({"model": "m:sql", "lora": "sql"}, "sql"),
        ({"model": "m:fr"}, "m:fr"),
        ({"model": "m:m:fr"}, "m:fr"),
    ],
)
def test_an_adapter_is_named_by_lora_or_as_a_model(fields: dict[str, str], lora: str) -> None:
    offering = replace(MODEL, lora_adapters=("sql", "m:fr"))
    spec = parse_generate(request(**fields), LIMITS, Bytes(), offering, lambda: SEED)
    assert spec.lora == lora


@pytest.mark.parametrize(
    ("fields", "offered", "problem"),
    [
        ({"lora": "sql"}, (), "lora: must be empty: no LoRA adapter is offered, got 'sql'"),
        ({"lora": "x" * 80}, ("sql", "fr"), f"lora: must be empty or one of sql, fr, got '{'x' * 64}'"),
        ({"model": "x"}, ("sql",), "model: must be 'm', a LoRA adapter of it or empty, got 'x'"),
        ({"model": "sql:m"}, ("sql",), "model: must be 'm', a LoRA adapter of it or empty, got 'sql:m'"),
        (
            {"model": "sql", "lora": "fr"},
            ("sql", "fr"),
            "lora: must be 'sql' as in model, or empty, got 'fr'",
        ),
    ],
)
def test_an_adapter_that_is_not_offered_is_refused_before_the_prompt(
    fields: dict[str, str], offered: tuple[str, ...], problem: str
) -> None:
    tokenizer = Bytes()
    with pytest.raises(InvalidField) as caught:
        parse_generate(
            request(**fields), LIMITS, tokenizer, replace(MODEL, lora_adapters=offered), lambda: SEED
        )
    assert str(caught.value) == problem
    assert tokenizer.calls == 0


@given(st.binary(max_size=60))
def test_any_message_is_taken_or_refused_by_name(data: bytes) -> None:
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    try:
        spec = parse_generate(message, LIMITS, Bytes(), MODEL, lambda: SEED)
    except InvalidField:
        return
    assert 0 < len(spec.prompt) < spec.max_position <= MODEL.context_window
