"""The generated code is that of proto/."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_committed_code_is_what_the_proto_files_give(tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    made["generate"](tmp_path)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in made["OUT"].iterdir() if path.is_file() and path.suffix != ".md"}
    assert {"rollout_pb2.py", "rollout_pb2.pyi", "rollout_pb2_grpc.py", "policy_pb2_grpc.pyi"} <= set(fresh)
    assert fresh == committed, "run: make proto"
