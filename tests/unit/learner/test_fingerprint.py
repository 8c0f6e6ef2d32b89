"""What an epoch's bits depend on: torch's part where the learner is one of torch's, and no import of torch for any other."""

from __future__ import annotations

import json
import subprocess
import sys

SAYS = (
    "import json, sys\n{first}\nfrom towline.learner.fingerprint import environment\n"
    "found = environment('cpu')\nprint(json.dumps([found, 'torch' in sys.modules]))"
)


def environment_after(first: str) -> tuple[dict[str, str], bool]:
    """(the environment of a process that began with `first`, whether it has imported torch)"""
    output = subprocess.run([sys.executable, "-c", SAYS.format(first=first)], capture_output=True, text=True, check=True).stdout
    environment, loaded = json.loads(output)
    return environment, loaded


def test_a_learner_without_torch_neither_has_torchs_part_nor_loads_it():
    alone, loaded = environment_after("import towline.loadtest.trainer, towline.loadtest.learner")
    assert not loaded
    assert "threads" not in alone
    with_torch, loaded = environment_after("import torch; torch.set_num_threads(1)")
    assert loaded
    assert {"threads": "1", "deterministic": "False"}.items() <= with_torch.items()
    assert alone.items() <= with_torch.items()
    assert {"torch", "numpy", "device", "instructions", "machine"} <= set(alone)
