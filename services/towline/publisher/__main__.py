"""python -m towline.publisher --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.publisher.service import PublisherService
from towline.runtime.service import service_main

if __name__ == "__main__":
    service_main(PublisherService)
