import msgspec
import pytest

from engine.byte_tokenizer import byte_text
from engine.errors import RequestError
from engine.openai.api import (
    ChatRequest,
    CompletionRequest,
    check_supported,
    parse_request,
    prompt_tokens,
    sampling_params,
    transfer_of,
)
from engine.runtime.turns import EVERYBODYS, WorkShare

TOKENIZER = byte_text()
TICKET = {
    "transfer_id": "t",
    "secret": "Cg==",
    "num_tokens": 5,
    "have_tokens": 0,
    "tokens_digest": "/w==",
    "endpoints": [["shm", "127.0.0.1:1", "host"]],
    "ttl_s": 5,
    "layout_fingerprint": "f",
    "node_id": "d",
    "cluster": "pd",
}


def completion(**fields):
    return parse_request(msgspec.json.encode({"model": "m", "prompt": "hi"} | fields), CompletionRequest)


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_request(msgspec.json.encode(body), ChatRequest)


def everything(request):
    """What the server asks of a parsed request."""
    check_supported(request)
    transfer_of(request.kv_transfer_params)
    prompt = prompt_tokens(request, TOKENIZER, 512)
    return sampling_params(request, len(prompt), 1024, 512, seed=5)


def refusal(make, **fields):
    with pytest.raises(RequestError) as caught:
        everything(make(**fields))
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": 7}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"seed": "a"}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1, 512]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"model": 3}, "model"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.ticket"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params.transfer_id"),
        ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"salt": "xyz"}}, "kv_transfer_params.salt"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"kv_transfer_params": {"ticket": {}}}, "kv_transfer_params.ticket.transfer_id"),
    ],
)
def test_bad_completions_name_the_field(fields, param):
    error = refusal(completion, **fields)
    assert error.param == param
    assert error.status == 400
    assert param.split(".")[-1] in error.message or "leg" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": "hello"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_bad_chats_name_the_field(fields, param):
    assert refusal(chat, **fields).param == param


NOT_DONE = {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= x",
    "structured_outputs": {"json": {}},
    "structural_tag": "x",
    "bad_words": ["no"],
    "allowed_token_ids": [7],
    "truncate_prompt_tokens": 0,
    "use_beam_search": True,
    "logits_processors": ["x"],
    "prompt_logprobs": 1,
    "include_stop_str_in_output": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "chat_template": "{{ 1 }}",
    "functions": [{}],
    "function_call": "auto",
    "tool_choice": "required",
    "modalities": ["audio"],
    "audio": {"voice": "x"},
}


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("field", sorted(NOT_DONE))
def test_what_is_not_done_is_refused_by_name(make, field):
    error = refusal(make, **{field: NOT_DONE[field]})
    assert (error.param, error.status, error.code) == (field, 400, "unsupported_parameter")


def test_asking_for_what_is_done_anyway_is_fine():
    harmless = dict.fromkeys(NOT_DONE) | {"skip_special_tokens": True, "use_beam_search": False, "bad_words": []}
    harmless |= {"tool_choice": "none", "tools": [], "modalities": ["text"], "response_format": {"type": "text"}}
    assert everything(completion(add_special_tokens=True, **harmless)) == everything(completion())
    assert everything(chat(add_special_tokens=False, **harmless)) == everything(chat())


def test_the_generation_prompt_can_be_left_out():
    whole, without = (prompt_tokens(chat(add_generation_prompt=wanted), TOKENIZER, 512) for wanted in (True, False))
    assert whole[: len(without)] == without
    assert len(whole) > len(without)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b'{"model": "m"'])
def test_bodies_that_are_no_request(body):
    with pytest.raises(RequestError):
        parse_request(body, CompletionRequest)


def test_missing_field_is_named():
    with pytest.raises(RequestError, match="prompt: this field is required"):
        parse_request(b'{"model": "m"}', CompletionRequest)


@pytest.mark.parametrize("fields", [{"max_tokens": 1023}, {"prompt": [5] * 1024}, {"prompt": "x" * 3000}])
def test_too_long_for_the_context(fields):
    error = refusal(completion, **fields)
    assert (error.code, error.status) == ("context_length_exceeded", 400)
    assert "1024" in error.message


def test_an_answer_of_more_tokens_than_it_may_have_is_refused():
    error = refusal(completion, max_tokens=5, min_tokens=6)
    assert (error.param, error.status) == ("min_tokens", 400)
    assert everything(completion(max_tokens=5, min_tokens=5)).min_tokens == 5
    assert refusal(completion, min_tokens=17).param == "min_tokens", "OpenAI's default is 16"


def test_defaults_are_openais():
    assert everything(completion()).max_tokens == 16
    params = everything(chat())
    prompt = prompt_tokens(chat(), TOKENIZER, 512)
    assert params.max_tokens == 1024 - len(prompt)
    assert (params.temperature, params.top_p, params.seed, params.top_logprobs) == (1.0, 1.0, 5, None)
    assert everything(chat(max_tokens=3, max_completion_tokens=4)).max_tokens == 4
    assert everything(completion(prompt=[7] * 1020)).max_tokens == 4


def test_nulls_are_as_good_as_absent():
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stream",
        "stop",
        "seed",
        "logprobs",
        "logit_bias",
        "stream_options",
    )
    assert everything(completion(**dict.fromkeys(names))) == everything(completion())


def test_unknown_fields_are_ignored_as_by_openai():
    assert everything(completion(user="me", metadata={"a": 1})) == everything(completion())


def test_prompts_in_all_shapes():
    expected = TOKENIZER.encode("hi").tolist()
    for prompt in ("hi", ["hi"], expected, [expected]):
        assert prompt_tokens(completion(prompt=prompt), TOKENIZER, 512) == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    apart = prompt_tokens(chat(messages=parts), TOKENIZER, 512)
    assert TOKENIZER.decode(apart) == "user: h\ni\nassistant: "
    assert TOKENIZER.decode(prompt_tokens(chat(), TOKENIZER, 512)) == "user: hi\nassistant: "


def test_ticket_comes_back_as_bytes():
    transfer = transfer_of(
        completion(kv_transfer_params={"do_remote_decode": True, "ticket": TICKET, "salt": "0102"}).kv_transfer_params
    )
    assert transfer.salt == b"\x01\x02"
    assert transfer.ticket is not None
    assert (transfer.ticket.secret, transfer.ticket.tokens_digest) == (b"\x0a", b"\xff")
    assert transfer.ticket.endpoints == (("shm", "127.0.0.1:1", "host"),)
    broken = {"do_remote_decode": True, "ticket": TICKET | {"secret": "zz"}}
    assert refusal(completion, kv_transfer_params=broken).param == "kv_transfer_params.ticket.secret"


def test_whose_a_request_is():
    params = completion(kv_transfer_params={"tenant": "acme", "weight": 2}).kv_transfer_params
    assert transfer_of(params).part == WorkShare("acme", 2.0)
    assert (
        transfer_of(None).part == transfer_of(completion(kv_transfer_params={}).kv_transfer_params).part == EVERYBODYS
    )
    assert refusal(completion, kv_transfer_params={"tenant": "a" * 129}).param == "kv_transfer_params.tenant"
    for weight in (0, -1, 1e4, 1e-4, True, "2"):
        assert refusal(completion, kv_transfer_params={"weight": weight}).param == "kv_transfer_params.weight"


@pytest.mark.parametrize("weight", [b"1e999", b"NaN", b"Infinity"])
def test_a_weight_is_finite(weight):
    body = b'{"model":"tiny","prompt":"a","kv_transfer_params":{"weight":' + weight + b"}}"
    with pytest.raises(RequestError):
        parse_request(body, CompletionRequest)


def test_a_seed_below_nothing_is_another_one_than_above():
    seeds = [sampling_params(completion(seed=seed), 3, 1024, 512, seed=5).seed for seed in (7, -7, 0, -1, 1)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == 7
    assert min(seeds) >= 0
