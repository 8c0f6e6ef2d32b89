"""Makes libs/towline/pb from proto/: `make proto`. With a folder's name it writes there instead, which is how a test sees that
what is committed is fresh."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent
SOURCES = PROTO / "towline" / "v1"
OUT = PROTO.parent / "libs" / "towline" / "pb"


def generate(out: Path) -> None:
    """Modules and typed stubs of every proto file into `out`."""
    # Under the name that their import has: protoc takes a module's package from the path it finds its source by.
    package = Path("towline") / "pb"
    scratch = out / ".generated"
    scratch.mkdir(parents=True, exist_ok=True)
    # Stubs by mypy-protobuf: protoc's own aren't clean under mypy --strict.
    plugins = [f"--plugin={path}" for path in Path(sys.executable).parent.glob("protoc-gen-mypy*")]
    outs = [f"--python_out={scratch}", f"--grpc_python_out={scratch}"]
    stubs = [f"--mypy_out=quiet:{scratch}", f"--mypy_grpc_out=quiet:{scratch}"]
    sources = [str(source) for source in sorted(SOURCES.glob("*.proto"))]
    if protoc.main(["protoc", f"-I{package}={SOURCES}", *plugins, *outs, *stubs, *sources]) != 0:
        raise SystemExit(1)
    for made in (scratch / package).iterdir():
        made.replace(out / made.name)
    (scratch / package).rmdir()
    (scratch / package.parent).rmdir()
    scratch.rmdir()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
