from engine.byte_tokenizer import byte_text
from engine.openai.answers import AnswerShape
from engine.openai.api import ChatRequest, CompletionRequest
from engine.runtime.sampling import SampledToken, TokenLogprob

TOKENIZER = byte_text()
EMOJI = TOKENIZER.encode("😀").tolist()
(A,) = TOKENIZER.encode("a").tolist()


def sampled(*tokens, top=()):
    return [
        SampledToken(token, -1.0, tuple(TokenLogprob(each, -2.0 - at) for at, each in enumerate(top)))
        for token in tokens
    ]


def logprobs(request, said):
    shape = AnswerShape(request, "1", 0, TOKENIZER)
    return shape.chunk("", said, None)["choices"][0]["logprobs"]


def completion(said):
    return logprobs(CompletionRequest(model="m", prompt="x", logprobs=2), said)


def test_a_chat_tells_the_bytes_of_a_piece_of_a_character():
    told = logprobs(ChatRequest(model="m", messages=[], logprobs=True, top_logprobs=1), sampled(*EMOJI, A, top=[A]))
    assert [entry["bytes"] for entry in told["content"]] == [[byte] for byte in "😀a".encode()]
    assert [entry["token"] for entry in told["content"]] == ["\\xf0", "\\x9f", "\\x98", "\\x80", "a"]
    assert told["content"][0]["top_logprobs"] == [{"token": "a", "logprob": -2.0, "bytes": [97]}]


def test_pieces_of_characters_do_not_take_each_others_place():
    (top,) = completion(sampled(A, top=EMOJI))["top_logprobs"]
    assert top == {"a": -1.0, "bytes:\\xf0": -2.0, "bytes:\\x9f": -3.0, "bytes:\\x98": -4.0, "bytes:\\x80": -5.0}


def test_the_chosen_token_is_among_the_likeliest_once():
    assert completion(sampled(A))["top_logprobs"] == [{"a": -1.0}]
    assert completion(sampled(A, top=[A, EMOJI[0]]))["top_logprobs"] == [{"a": -1.0, "bytes:\\xf0": -3.0}]


def test_two_tokens_of_one_name_are_told_apart():
    class Alike:
        """A vocabulary whose tokens all have one text."""

        def token_text(self, token):
            return "x"

        def token_bytes(self, token):
            return b"x"

        def bytes_of_pieces(self, token):
            return None

    shape = AnswerShape(CompletionRequest(model="m", prompt="x", logprobs=2), "1", 0, Alike())
    (top,) = shape.chunk("", sampled(1, top=[2, 3]), None)["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"x": -1.0, "token_id:2": -2.0, "token_id:3": -3.0}


def test_pieces_of_a_character_begin_where_it_does():
    assert completion(sampled(A, *EMOJI, A))["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_offsets_go_on_after_what_another_engine_answered():
    request = CompletionRequest(model="m", prompt="x", logprobs=0)
    shape = AnswerShape(request, "1", 0, TOKENIZER, answered=[A, *EMOJI[:2]])
    told = shape.chunk("", sampled(*EMOJI[2:], A), None)["choices"][0]["logprobs"]
    assert told["text_offset"] == [1, 1, 2]
