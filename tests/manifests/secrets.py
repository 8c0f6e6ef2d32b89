"""The Secrets that k8s/README.md's commands make: they are run as they stand, with a kubectl that puts each into a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from manifests.rendered import FOLDER

_KUBECTL = """\
#!{python}
import sys
from pathlib import Path

words = sys.argv[1:]
if words[:3] == ["create", "secret", "generic"]:
    folder = Path({out!r}) / words[3]
    folder.mkdir(parents=True)
    for word in words[4:]:
        kind, _, given = word.partition("=")
        key, _, value = given.rpartition("=")
        if kind == "--from-literal":
            key, _, value = given.partition("=")
            (folder / key).write_text(value)
        elif kind == "--from-file":
            (folder / (key or Path(value).name)).write_bytes(Path(value).read_bytes())
        else:
            sys.exit(f"unknown: {{word}}")
elif words[:1] not in (["apply"], ["config"], ["delete"]):
    sys.exit(f"unknown: {{words}}")
"""


def block(holds: str) -> str:
    """The README's one block of commands that has this line's beginning in it."""
    text = (FOLDER / "README.md").read_text()
    found = [one for one in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE) if holds in one]
    assert len(found) == 1, holds
    return str(found[0])


DEV_BLOCK = "overlays/dev/namespace.yaml"
PROD_BLOCK = "overlays/prod/namespace.yaml"
DOOR_BLOCK = "towline access sites"
SITE_BLOCK = "overlays/site-b/namespace.yaml"
NEAR_BLOCK = "overlays/near/namespace.yaml"


def made(folder: Path, out: str, holds: str, *, leaf: str = "") -> dict[str, Path]:
    """Name -> folder of the Secrets that the block makes, run in `folder`. `leaf`: the door's name."""
    tools = folder / f"bin-{out}"
    tools.mkdir()
    (tools / "kubectl").write_text(_KUBECTL.format(python=sys.executable, out=str(folder / out)))
    (tools / "kubectl").chmod(0o700)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    script = "set -eu\n" + block(holds).replace("LEAF.EXAMPLE", leaf or "leaf.example")
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {one.name: one for one in (folder / out).iterdir()}
