"""Where the test data lies."""

from pathlib import Path

MOONCAKE = Path(__file__).parent / "data" / "mooncake_conversation_400.jsonl.xz"
