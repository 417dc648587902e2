"""Other ways to ask for a chat: Anthropic's Messages and OpenAI's Responses, each a translation onto `/v1/chat/completions`.

    body in its dialect ─► chat body ─► the corridor, as for every chat ─► chat answer or events ─► the dialect's
          requests                                                               Telling

So prompts become the same tokens and blocks whichever way they came, and engines need to know one dialect. Nothing is kept
between two requests.
"""
