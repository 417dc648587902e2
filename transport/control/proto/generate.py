"""Generates the gRPC modules beside this file: `python -m transport.control.proto.generate [OUT]`."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]


def generate(out: Path = ROOT) -> None:
    """Writes transport/control/proto/*_pb2*.py below `out`. Raises RuntimeError if protoc refuses."""
    protos = sorted((ROOT / "transport" / "control" / "proto").glob("*.proto"))
    own = Path(protoc.__file__).parent / "_proto"  # google/protobuf/*.proto
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{own}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
    ]
    status = protoc.main([*arguments, *map(str, protos)])
    if status:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
