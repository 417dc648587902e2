"""Errors on the way from a request to its tokens.

PromptsError
├── TokenizerUnreadable   a model directory's tokenizer or chat template cannot be used
├── TakesLonger           there is more to read than was allowed
└── BadPrompt             the client's own mistake; `param` names the field
    └── TemplateError     the chat template does not accept these messages
"""


class PromptsError(Exception):
    """Base of all errors of this package."""


class TokenizerUnreadable(PromptsError):
    """A model directory's tokenizer or chat template cannot be used."""


class TakesLonger(PromptsError):
    """There is more to read than was allowed."""


class BadPrompt(PromptsError):
    """A request that stands for no tokens: `message` is for the client, as `param` and `code` of OpenAI's errors are."""

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class TemplateError(BadPrompt):
    """The chat template does not accept these messages."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The chat template refuses these messages: {reason}", param="messages")
