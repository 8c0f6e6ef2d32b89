"""`towline ui`: the web view of a run or a bundle, on this machine."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from towline.cli.source import SourceArgument, open_source


def ui(
    target: SourceArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in the browser.")] = False,
) -> None:
    """Look at a run, or a bundle, in the browser: reward, versions, replicas, every trajectory. Ctrl-C ends it; it only reads."""
    asyncio.run(_serve(target, port, browser))


async def _serve(target: str, port: int, browser: bool) -> None:
    import webbrowser

    from towline.bundle.source import BusSource
    from towline.config import GatewaySettings
    from towline.gateway.server import ApiServer
    from towline.gateway.ui_routes import standing_alone
    from towline.view.feed import BusFeed, StillFeed

    async with open_source(target) as source:
        app, ui = standing_alone(BusFeed(source.bus, source) if isinstance(source, BusSource) else StillFeed(source))
        server = ApiServer(app, GatewaySettings(host="127.0.0.1", port=port))
        running = asyncio.create_task(ui.run(), name="ui")
        try:
            await server.start()
            address = f"http://127.0.0.1:{server.port}/ui/"
            print(f"{source.where}: {address}  (Ctrl-C ends it)", flush=True)
            if browser:
                webbrowser.open(address)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.close(1.0)
