"""`make demo-agent`: a run with a gateway (`towline up run.toml`), the agent beside it until the run is over, and an audit."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from agent import Agent

HERE = Path(__file__).resolve().parent
TOWLINE = [sys.executable, "-m", "towline.cli.main"]
START_SECONDS = 300.0


def gateway_url(run: str, up: subprocess.Popen[bytes]) -> str:
    """Where the run's gateway listens, once it is ready."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and up.poll() is None:
        said = subprocess.run([*TOWLINE, "status", run, "--json"], capture_output=True, check=False)
        for service in json.loads(said.stdout or b"{}").get("services", []) if said.returncode == 0 else []:
            if service.get("service") == "gateway" and service.get("ready"):
                return str(service["figures"]["api_url"])
        time.sleep(1.0)
    raise SystemExit("the run's gateway didn't come up: see towline up's own lines above")


def main() -> int:
    options = sys.argv[1:]
    run = options[options.index("--run") + 1] if "--run" in options else "agent"
    up = subprocess.Popen([*TOWLINE, "up", str(HERE / "run.toml"), *options])
    try:
        agent = Agent(gateway_url(run, up))
        asyncio.run(agent.run())
        print("the agent:", ", ".join(f"{count} {what}" for what, count in sorted(agent.counts.items())))
        code = up.wait()
    except KeyboardInterrupt:
        code = up.wait()
    return code or subprocess.run([*TOWLINE, "audit", run], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
