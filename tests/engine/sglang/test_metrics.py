"""What SGLang's endpoint, which reads files of all its processes, finds of ours."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

COUNT = """
from engine.sglang.metrics import FallbackMetric
metric = FallbackMetric()
metric.count("save", "no_capacity")
metric.count("save", "no_capacity")
metric.count("load", "TimeoutError")
"""


def test_fallbacks_of_a_process_are_in_the_files_that_the_endpoint_reads(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COUNT], env=environment, check=True, timeout=60.0)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    page = generate_latest(registry).decode()
    assert 'prfaas_sglang_fallbacks_total{call="save",reason="no_capacity"} 2.0' in page
    assert 'prfaas_sglang_fallbacks_total{call="load",reason="TimeoutError"} 1.0' in page
