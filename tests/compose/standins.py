"""Base images made on this machine and tagged as the public ones, for an engine that reaches no registry.

python: a Debian from debootstrap with Debian's Python 3.11. nats and seaweedfs: the binaries of the virtual environment, beside
a busybox. prometheus: Debian's. What pip needs on this machine to reach its index (authorities, a torch for CPUs) goes into the
first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from compose.engine import CACHE, Engine, call

PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


def make_missing(engine: Engine, python: str, nats: str, store: str, prometheus: str, torch: str) -> None:
    """The images by their names; `torch` is a requirement that pip resolves on this machine."""
    binaries = Path(sys.executable).parent
    makers: dict[str, Callable[[Path], None]] = {
        python: lambda root: _python(root, torch),
        nats: lambda root: _beside_busybox(root, binaries / "nats-server", "usr/local/bin/nats-server"),
        store: lambda root: _beside_busybox(root, binaries / "weed", "usr/bin/weed"),
    }
    for name, make in makers.items():
        if engine.docker("images", "--quiet", name).strip():
            continue
        with _folder() as root:
            make(root)
            archive = root.with_suffix(".tar")
            call(["tar", "-C", str(root), "-cf", str(archive), "."], os.environ, 120)
            engine.docker("import", "--change", PATH, str(archive), name, seconds=120)
    if not engine.docker("images", "--quiet", prometheus).strip():
        with _folder() as context:
            _unpack("prometheus", "usr/bin/prometheus", context / "prometheus")
            _unpack("busybox-static", "bin/busybox", context / "busybox")
            (context / "Dockerfile").write_text(
                f'FROM {python}\nCOPY prometheus busybox /bin/\nRUN ln -s busybox /bin/wget\nENTRYPOINT ["/bin/prometheus"]\n'
            )
            engine.docker("build", "--quiet", "--tag", prometheus, str(context), seconds=120)


def _python(root: Path, torch: str) -> None:
    where = call(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"], os.environ, 30).split()
    mirror = where[:1] if where else []
    call(["debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", "bookworm", str(root), *mirror],
         os.environ, 600)  # fmt: skip
    for name in ("python", "python3"):
        (root / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    if AUTHORITIES.is_file():
        shutil.copy(AUTHORITIES, root / AUTHORITIES.relative_to("/"))
    wheels = root / "opt/wheels"
    call([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), torch], os.environ, 600)
    for wheel in wheels.iterdir():
        if "+cpu" not in wheel.name:  # the index has it just as well
            wheel.unlink()
    (root / "etc/pip.conf").write_text(f"[global]\ncert = {AUTHORITIES}\nfind-links = /opt/wheels\n")
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
        (root / folder).mkdir()


def _beside_busybox(root: Path, binary: Path, place: str) -> None:
    for folder in ("bin", "tmp", "etc", "data", str(Path(place).parent)):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)  # a tmpfs over it takes this over
    _unpack("busybox-static", "bin/busybox", root / "bin/busybox")
    for name in ("sh", "wget"):
        (root / "bin" / name).symlink_to("busybox")
    shutil.copy(binary.resolve(), root / place)


def _unpack(package: str, path: str, target: Path) -> None:
    """One file of a Debian package."""
    with _folder() as scratch:
        scratch.parent.chmod(0o755)
        scratch.chmod(0o777)  # apt fetches as a user of its own
        subprocess.run(["apt-get", "download", "--quiet", package], cwd=scratch, capture_output=True, check=True, timeout=120)
        call(["dpkg", "-x", str(next(scratch.glob("*.deb"))), str(scratch / "x")], os.environ, 30)
        shutil.copy(scratch / "x" / path, target)


@contextmanager
def _folder() -> Iterator[Path]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=CACHE) as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        yield root
