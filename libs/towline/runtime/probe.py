"""`python -m towline.runtime.probe [PATH]`: asks the service beside it in its container for PATH (/readyz), for a health check.

`/readyz?standbyok=true` is well on a standby too (health.py).

Exit status 0 where the answer is 200; else 1, and one line says why. Port and token come from the service's own environment,
TOWLINE_SERVICE__PORT and TOWLINE_SERVICE__TOKEN_FILE or __TOKEN. It's asked often, so it imports the standard library alone.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

SECONDS = 3.0


def probe(path: str, environment: dict[str, str]) -> str:
    """Why the service isn't well; "" where it is."""
    port = environment.get("TOWLINE_SERVICE__PORT", "")
    if not port.isdecimal() or port == "0":
        return "TOWLINE_SERVICE__PORT isn't set: give the service a port of its own"
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=SECONDS)
    try:
        token = environment.get("TOWLINE_SERVICE__TOKEN", "")
        if named := environment.get("TOWLINE_SERVICE__TOKEN_FILE", ""):
            token = Path(named).read_text().strip()
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        body = answer.read(1000).decode(errors="replace")
        return "" if answer.status == http.client.OK else f"{answer.status}: {body}"
    except (OSError, http.client.HTTPException) as error:
        return f"127.0.0.1:{port}{path}: {error or type(error).__name__}"
    finally:
        connection.close()


if __name__ == "__main__":
    why = probe(sys.argv[1] if len(sys.argv) > 1 else "/readyz", dict(os.environ))
    print(why or "ok")
    sys.exit(1 if why else 0)
