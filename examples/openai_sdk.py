"""OpenAI's SDK against a gateway: `GATEWAY=http://127.0.0.1:8000 python examples/openai_sdk.py`."""

import os

from openai import OpenAI

gateway = os.environ.get("GATEWAY", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{gateway}/v1", api_key=os.environ.get("API_KEY", "unused"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Hello"}]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
print("chat:  ", answer.choices[0].message.content)

stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

# The route is a header: which cluster computed the prompt, how much of it, and why there.
raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=8)
print("route: ", raw.headers["x-prfaas-route"])

# A conversation that goes on finds the KVCache of its earlier turns.
turns = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]
longer = [*turns, {"role": "user", "content": "And then? " * 200}]
for _ in range(2):
    usage = client.chat.completions.create(model=model, messages=longer, max_tokens=8).usage
    details = usage.prompt_tokens_details
    print("usage: ", usage.prompt_tokens, "prompt tokens,", details.cached_tokens if details else 0, "of them cached")
