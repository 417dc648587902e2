"""aiperf, unmodified, replays a trace in Mooncake's format against a gateway: `python -m tests.clients.replay AIPERF URL`.

The trace is short, as aiperf makes the texts of longer ones in processes of its own, which do not start everywhere.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TRACE: Final = Path(__file__).with_name("mooncake.jsonl")
TOKENIZER: Final = ".prfaas/models/kimi_linear-0"  # the demo's, by which aiperf counts
MODEL: Final = "prfaas-tiny"


def main(aiperf: str, url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
                   "--tokenizer", TOKENIZER, "--input-file", str(TRACE), "--custom-dataset-type", "mooncake_trace",
                   "--fixed-schedule", "--extra-inputs", "ignore_eos:true", "--ui", "none",
                   "--output-artifact-dir", folder]  # fmt: skip
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    asked = len(TRACE.read_text().splitlines())
    answered, failed = report["request_count"]["avg"], report["error_summary"]
    if answered != asked or failed:
        raise SystemExit(f"of {asked} requests {answered:g} were answered: {failed}")
    print(
        f"{asked} of {asked} requests of a trace answered, to the first token {report['time_to_first_token']['avg']:.0f} ms"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
