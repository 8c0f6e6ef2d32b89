"""Prints what Towline needs from package indexes, one requirement a line: python dependencies.py EXTRA… (from ../pyproject.toml).

An image installs this before Towline's own code is copied, so that a change of the code doesn't install everything again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Those of the package and of the named extras; references from one extra to another are left out: name both."""
    project = tomllib.loads(pyproject)["project"]
    found = [*project["dependencies"]]
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return [line for line in found if not line.startswith(f"{project['name']}[")]


if __name__ == "__main__":
    beside = Path(__file__).parent
    places = (beside / "pyproject.toml", beside.parent / "pyproject.toml")
    text = next(path for path in places if path.is_file()).read_text()
    print("\n".join(requirements(text, sys.argv[1:])))
