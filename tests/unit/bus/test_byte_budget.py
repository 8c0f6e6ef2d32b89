"""Bytes in flight: never over the limit, in the order of asking, nobody forgotten."""

from __future__ import annotations

import asyncio
import random

from towline.bus.publish import ByteBudget


async def test_never_more_than_the_limit_is_out_and_everybody_gets_a_turn() -> None:
    limit, out, most, served = 100, 0, 0, 0
    budget = ByteBudget(limit)
    draw = random.Random(0)

    async def user(size: int) -> None:
        nonlocal out, most, served
        async with budget.hold(size):
            out += min(size, limit)
            most = max(most, out)
            await asyncio.sleep(draw.random() / 1000)
            out -= min(size, limit)
            served += 1

    await asyncio.gather(*(user(draw.choice([0, 1, 30, 99, 100, 5000])) for _ in range(300)))
    assert (served, out) == (300, 0)
    assert most == limit


async def test_turns_come_in_the_order_of_asking() -> None:
    budget = ByteBudget(10)
    first = await budget.take(8)
    order: list[str] = []

    async def user(name: str, size: int) -> None:
        async with budget.hold(size):
            order.append(name)

    large = asyncio.create_task(user("large", 9))
    await asyncio.sleep(0)
    small = asyncio.create_task(user("small", 1))
    await asyncio.sleep(0.01)
    assert order == [], "a small one that came later doesn't pass a large one for ever"
    budget.give(first)
    await asyncio.gather(large, small)
    assert order == ["large", "small"]


async def test_whoever_stops_waiting_gives_its_room_back() -> None:
    budget = ByteBudget(10)
    taken = await budget.take(10)
    waiting = [asyncio.create_task(budget.take(10)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    budget.give(taken)
    waiting[1].cancel()  # in the same moment in which it has its turn
    assert await asyncio.wait_for(waiting[2], 1.0) == 10
