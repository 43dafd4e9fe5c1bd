"""A headless Chromium, driven over its debugging pipe: no port, and nothing else to install."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

from tests.fakes.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    # In a container there are no user namespaces to build its sandbox of; it only ever opens our own files.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_PATIENCE_S = 60.0
# Chromium reads commands from descriptor 3 and answers on 4.
_TAKE_PIPES = 'exec "$0" "$@" 3<&{} 4>&{}'

_UNTIL = """new Promise((done, fail) => {{
  const late = performance.now() + {patience_ms};
  const see = () => {{
    if ({expression}) done();
    else if (performance.now() > late) fail(new Error(document.body.innerText));
    else setTimeout(see, 10);
  }};
  see();
}})"""

_MIDDLE = """e => {
  e.scrollIntoView({block: 'center'});
  const box = e.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, path: str, profile: Path, width: int = 1280, height: int = 900) -> None:
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        pipes = (command_read, answer_write)
        flags = (
            *_FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        )
        self._process = subprocess.Popen(
            ["bash", "-c", _TAKE_PIPES.format(*pipes), path, *flags, "about:blank"],
            pass_fds=pipes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        for pipe in pipes:
            os.close(pipe)
        self._unread = b""
        self._last_id = 0
        self._session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False

    def __enter__(self) -> Self:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str) -> None:
        self.complaints.clear()
        self.requests.clear()
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()

    def value(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        results: list[str] = self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )
        return results

    def until(self, expression: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until the expression is true in the page."""
        self.value(_UNTIL.format(expression=expression, patience_ms=1000 * patience_s))

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field, as a person would."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **text)

    def point_at(self, selector: str) -> None:
        x, y = self._middle(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str) -> tuple[float, float]:
        x, y = self.value(f"({_MIDDLE})(document.querySelector({json.dumps(selector)}))")
        return x, y

    def in_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, highest: int) -> bytes:
        width, height = self.value("[document.documentElement.clientWidth, document.body.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, highest), "scale": 1}
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return b64decode(answer["data"])

    def send(self, method: str, **params: Any) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == message["id"]:
                if "error" in received:
                    raise AssertionError(f"{method}: {received['error']}")
                return received["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], deadline - time.monotonic())[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._answers, 2**16)
            if not read:
                raise ConnectionError("the browser has ended")
            self._unread += read
        line, self._unread = self._unread.split(b"\0", 1)
        received: dict[str, Any] = json.loads(line)
        self._note(received.get("method", ""), received.get("params", {}))
        return received

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(params))
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"a dialog: {params.get('message')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
