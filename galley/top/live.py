"""Scrape and show repeatedly: on a terminal in its alternate screen with keys, elsewhere as lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live

from galley.stack.endpoint import Service
from galley.top.controls import Controls, keys_of
from galley.top.fleet import Fleet, Registered
from galley.top.scrape import TIMEOUT_S, Away, scrape
from galley.top.screen import Screen, next_screen
from galley.top.view import render

ReadRegistry = Callable[[], Awaitable[Registered]]


class Scraper:
    """The source of frames: scrapes services that export metrics, and reads the registry if there is one."""

    def __init__(
        self, services: Sequence[Service], interval_s: float, read_registry: ReadRegistry | None = None
    ) -> None:
        self.interval_s = interval_s
        self._services = services
        self._read_registry = read_registry
        self._timeout_s = min(TIMEOUT_S, max(1.0, interval_s))
        self._fleet = Fleet(services, time.monotonic())

    async def refresh(self) -> Screen:
        async with asyncio.TaskGroup() as group:
            for service in self._services:
                group.create_task(self._scrape(service))
            if self._read_registry is not None:
                self._fleet.registered = await self._read_registry()
        return next_screen(self._fleet, time.monotonic())

    async def _scrape(self, service: Service) -> None:
        try:
            samples = await scrape(service.metrics, self._timeout_s)
        except Away as away:
            self._fleet.fail(service, time.monotonic(), str(away))
        else:
            self._fleet.add(service, time.monotonic(), samples)


async def once(scraper: Scraper, console: Console) -> bool:
    """Print one frame after two scrapes; return False if all processes are away."""
    await scraper.refresh()
    await asyncio.sleep(scraper.interval_s)
    screen = await scraper.refresh()
    console.print(render(screen, console.width))
    return screen.has_live_process


async def lines(scraper: Scraper, console: Console) -> None:
    """Print a frame after each scrape but the first, until cancelled."""
    await scraper.refresh()
    while True:
        await asyncio.sleep(scraper.interval_s)
        console.print(render(await scraper.refresh(), console.width))
        console.print()


async def live(scraper: Scraper, console: Console) -> None:
    """Show frames in the terminal's alternate screen until q is pressed; restore the terminal in any case."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    screen, controls = await scraper.refresh(), Controls()
    with Live(console=console, screen=True, auto_refresh=False) as display:

        def draw() -> None:
            display.update(render(screen, console.width, console.height, controls), refresh=True)

        def press(text: str) -> None:
            for key in keys_of(text):
                controls.press(key, screen)
            if controls.is_over or not text:
                done.set()
            else:
                draw()

        async def show() -> None:
            nonlocal screen
            while True:
                draw()
                await asyncio.sleep(scraper.interval_s)
                screen = await scraper.refresh()

        loop.add_signal_handler(signal.SIGWINCH, draw)
        try:
            with typed(press):
                async with asyncio.TaskGroup() as group:
                    showing = group.create_task(show())
                    await done.wait()
                    showing.cancel()
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def typed(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with what is typed, "" at the end of input; restore the terminal on exit.

    Do nothing without a terminal.
    """
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        press(os.read(fd, 1024).decode(errors="ignore"))

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
