"""Scraping and showing, again and again: on a terminal in its other screen until q, elsewhere in lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from galley.top.fleet import Fleet, Registered
from galley.top.scrape import TIMEOUT_S, Away, scrape
from galley.top.screen import Screen, Screens
from galley.top.service import Service
from galley.top.view import render

AskRegistry = Callable[[], Awaitable[Registered]]

_QUIT_KEYS = b"qQ\x03\x04"


@dataclass(frozen=True, slots=True)
class Watched:
    """What is shown: services that tell metrics, and a registry that is asked, if there is one."""

    services: tuple[Service, ...]
    interval_s: float
    registry: AskRegistry | None = None


class Scraper:
    """Keeps a fleet up to date."""

    def __init__(self, watched: Watched) -> None:
        self._registry = watched.registry
        self.interval_s = watched.interval_s
        self._timeout_s = min(TIMEOUT_S, max(1.0, watched.interval_s))
        self._fleet = Fleet(watched.services, time.monotonic())
        self._screens = Screens(self._fleet)

    async def again(self) -> Screen:
        """Ask everybody at once, and say what is to be seen then."""
        async with asyncio.TaskGroup() as group:
            for service in self._fleet.services:
                group.create_task(self._ask(service))
            if self._registry is not None:
                group.create_task(self._ask_registry(self._registry))
        return self._screens.next(time.monotonic())

    async def _ask(self, service: Service) -> None:
        try:
            samples = await scrape(service.metrics, self._timeout_s)
        except Away as away:
            self._fleet.missed(service, time.monotonic(), str(away))
        else:
            self._fleet.heard(service, time.monotonic(), samples)

    async def _ask_registry(self, ask: AskRegistry) -> None:
        self._fleet.registered = await ask()


async def once(watched: Watched, console: Console) -> bool:
    """Print the frame after two scrapes; whether anybody was there."""
    scraper = Scraper(watched)
    await scraper.again()
    await asyncio.sleep(watched.interval_s)
    screen = await scraper.again()
    console.print(render(screen, console.width))
    return screen.anybody


async def lines(watched: Watched, console: Console) -> None:
    """Print a frame after each scrape, but for the first, until cancelled."""
    scraper = Scraper(watched)
    await scraper.again()
    while True:
        await asyncio.sleep(watched.interval_s)
        console.print(render(await scraper.again(), console.width))
        console.print()


async def live(watched: Watched, console: Console) -> None:
    """Show frames in the terminal's other screen until q is pressed; a cancelled one restores it too."""
    scraper, done = Scraper(watched), asyncio.Event()
    loop = asyncio.get_running_loop()
    screen = await scraper.again()
    with Live(console=console, screen=True, auto_refresh=False) as shown, quit_key(done):

        def draw() -> None:
            shown.update(render(screen, console.width, console.height), refresh=True)

        async def show() -> None:
            nonlocal screen
            while True:
                draw()
                await asyncio.sleep(watched.interval_s)
                screen = await scraper.again()

        loop.add_signal_handler(signal.SIGWINCH, draw)
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(show())
                await done.wait()
                showing.cancel()
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def quit_key(done: asyncio.Event) -> Iterator[None]:
    """Set `done` when q is pressed, or nobody is left to press it; the terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        keys = os.read(fd, 1024)
        if not keys or set(keys) & set(_QUIT_KEYS):
            done.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
