"""Anthropic's SDK against a gateway: `GATEWAY=http://127.0.0.1:8000 python examples/anthropic_sdk.py`."""

import os

from anthropic import Anthropic

gateway = os.environ.get("GATEWAY", "http://127.0.0.1:8000")
client = Anthropic(base_url=gateway, api_key=os.environ.get("API_KEY", "unused"))
# The gateway lists models as OpenAI does; Anthropic's SDK has a low-level call for that.
model = client.get("/v1/models", cast_to=object)["data"][0]["id"]
messages = [{"role": "user", "content": "Hello"}]

message = client.messages.create(model=model, messages=messages, max_tokens=8)
print("message:", message.content[0].text)

with client.messages.stream(model=model, messages=messages, max_tokens=8) as stream:
    print("stream: ", "".join(stream.text_stream))

print("tokens: ", client.messages.count_tokens(model=model, messages=messages).input_tokens)
