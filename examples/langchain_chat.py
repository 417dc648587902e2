"""LangChain against a gateway: `GATEWAY=http://127.0.0.1:8000 python examples/langchain_chat.py`."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

gateway = os.environ.get("GATEWAY", "http://127.0.0.1:8000")
key = os.environ.get("API_KEY", "unused")
name = os.environ.get("MODEL", "prfaas-tiny")  # what `curl $GATEWAY/v1/models` lists
model = ChatOpenAI(model=name, base_url=f"{gateway}/v1", api_key=key, max_tokens=8, stream_usage=True)

prompt = ChatPromptTemplate.from_messages([("system", "You answer in one word."), ("user", "{question}")])
chain = prompt | model | StrOutputParser()
print("chain: ", chain.invoke({"question": "Which way?"}))
print("stream:", "".join(chain.stream({"question": "Which way?"})))
print("usage: ", model.invoke("Hello").usage_metadata)
