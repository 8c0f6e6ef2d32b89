"""python -m towline.gateway --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.gateway.service import GatewayService
from towline.runtime.service import service_main

if __name__ == "__main__":
    service_main(GatewayService)
