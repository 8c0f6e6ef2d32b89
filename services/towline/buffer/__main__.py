"""python -m towline.buffer --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.buffer.service import BufferService
from towline.runtime.service import service_main

if __name__ == "__main__":
    service_main(BufferService)
