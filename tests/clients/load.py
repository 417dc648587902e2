"""Load generators of other projects, unmodified, against a gateway: `python -m tests.clients.load BIN URL`.

`BIN` is the folder of their commands. aiperf replays a trace in Mooncake's format and plays agents, whose turns each send all
that was said before; guidellm keeps some chats under way. Every request has to be answered, and no error told.
The trace is short, as aiperf makes the texts of longer ones in processes of its own, which do not start everywhere.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

TRACE: Final = Path(__file__).with_name("mooncake.jsonl")
TOKENIZER: Final = Path(".prfaas/models/kimi_linear-0")  # the demo's, by which they count
MODEL: Final = "prfaas-tiny"
LIMIT_S: Final = 600
AGENTS, TURNS = 4, 5
OUTPUT_OF_A_TOOL: Final = "a line of what some tool has found\n" * 24
CHATS: Final = 24
AGENTS_OPTIONS: Final = (
    "--concurrency",
    str(AGENTS),
    "--num-conversations",
    str(AGENTS),
    "--extra-inputs",
    "max_tokens:16",
)


def main(binaries: str, url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        aiperf, folder = str(Path(binaries, "aiperf")), Path(name)
        replayed = run_aiperf(aiperf, url, folder / "trace", TRACE, "mooncake_trace", "--fixed-schedule")
        tell("requests of a trace", len(TRACE.read_text().splitlines()), replayed)
        sessions = folder / "sessions.jsonl"
        sessions.write_text("".join(json.dumps(session(agent)) + "\n" for agent in range(AGENTS)))
        played = run_aiperf(aiperf, url, folder / "agents", sessions, "multi_turn", *AGENTS_OPTIONS)
        tell("turns of agents", AGENTS * TURNS, played)
        tell("chats of guidellm", CHATS, run_guidellm(str(Path(binaries, "guidellm")), url, folder / "chats.json"))


def session(agent: int) -> dict[str, Any]:
    """An agent's: a question, and then what its tools said."""
    said = [f"You are agent {agent}. Look into it.", *(f"Step {turn}:\n{OUTPUT_OF_A_TOOL}" for turn in range(1, TURNS))]
    return {"session_id": f"agent-{agent}", "turns": [{"text": text} for text in said]}


def run_aiperf(aiperf: str, url: str, folder: Path, file: Path, kind: str, *options: str) -> tuple[int, float, object]:
    """How many were answered, the mean time to their first token in ms, and the errors."""
    run(aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer",
        str(TOKENIZER), "--input-file", str(file), "--custom-dataset-type", kind, "--extra-inputs", "ignore_eos:true",
        "--ui", "none", "--output-artifact-dir", str(folder), *options)  # fmt: skip
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    return int(report["request_count"]["avg"]), report["time_to_first_token"]["avg"], report["error_summary"]


def run_guidellm(guidellm: str, url: str, file: Path) -> tuple[int, float, object]:
    """As `run_aiperf` tells it."""
    run(guidellm, "run", "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/chat/completions",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={CHATS}",
        "--data", "kind=synthetic_text,prompt_tokens=600,output_tokens=16",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER.absolute()}",
        "--output", f"kind=json,path={file}", "--disable-console")  # fmt: skip
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    first = benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"]
    return totals["successful"], first, totals["errored"] or None


def run(*command: str) -> None:
    done = subprocess.run(command, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{command[0]} ended with {done.returncode}")


def tell(what: str, asked: int, came: tuple[int, float, object]) -> None:
    answered, first_ms, failed = came
    if answered != asked or failed:
        raise SystemExit(f"of {asked} {what} {answered} were answered: {failed}")
    print(f"{answered} of {asked} {what} answered, to the first token {first_ms:.0f} ms", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
