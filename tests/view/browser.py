"""A headless Chromium, driven over two pipes by its DevTools protocol, without further packages."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Chromium expects the pipes as descriptors 3 and 4. This program moves them there and then becomes the browser.
_MOVE = """
import os, sys
read, write = int(sys.argv[1]), int(sys.argv[2])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ANSWER_S = 20.0
_COMPLAINTS = ("error", "warning", "assert")
_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}


def find_browser() -> str | None:
    """The path of a Chromium, or None if this machine has none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with a profile in `folder`, as a context manager that ends all its processes."""

    def __init__(self, path: str, folder: Path) -> None:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        # Descriptors above 3 and 4.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_read, from_write)]
        for fd in (to_read, from_write):
            os.close(fd)
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--disable-extensions", "--no-default-browser-check", "--mute-audio",
            "--force-device-scale-factor=1", "--hide-scrollbars", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOVE, *map(str, ends), path, *options],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Chromium keeps crash reports and settings outside the profile.
            env={
                **os.environ,
                "HOME": str(folder),
                "XDG_CONFIG_HOME": str(folder),
                "XDG_CACHE_HOME": str(folder),
            },
        )
        for fd in ends:
            os.close(fd)
        self._to, self._from = to_write, from_read
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._listeners: dict[str, list[dict[str, Any]]] = {}
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        left = b""
        while chunk := os.read(self._from, 1 << 16):
            *messages, left = (left + chunk).split(b"\0")
            with self._news:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self._listeners.get(message.get("sessionId", ""), []).append(message)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer."""
        with self._news:
            self._number = number = self._number + 1
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        with self._news:
            if not self._news.wait_for(lambda: number in self._answers or self._ended, _ANSWER_S):
                raise TimeoutError(f"the browser did not answer {method}")
            if number not in self._answers:
                raise RuntimeError(f"the browser ended before it answered {method}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def listen(self, session: str) -> list[dict[str, Any]]:
        """A list that receives every event of a session."""
        with self._news:
            return self._listeners.setdefault(session, [])

    def open(self, url: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> Tab:
        """Open a new tab with a page that has finished loading."""
        return Tab(self, url, width, height, dark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        with self._news:
            self._news.wait_for(lambda: self._ended, 10)
        # End the whole session, because helpers may outlive the browser. Before wait(), its process id cannot be reused.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(5)
        for fd in (self._to, self._from):
            os.close(fd)


class Tab:
    """One page. All its log messages and requests are kept."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        self._events = browser.listen(self._session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            # Cells move to their places without an animation.
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        # The page gets keys even if another tab is in front.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol for this page and return its answer."""
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Set the window's inner size in CSS pixels."""
        sizes: dict[str, Any] = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": width < 600,
        }
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def ask(self, script: str) -> Any:
        """The value of an expression; for a promise, its result. Raises RuntimeError if the expression throws."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, condition: str, limit_s: float = 15.0) -> None:
        """Wait until an expression is true. Raises TimeoutError with the text of the page."""
        script = f"""new Promise((resolve) => {{
            const until = Date.now() + {limit_s * 1000};
            const look = () => {{
                let met = false;
                try {{ met = Boolean({condition}); }} catch {{ /* not there yet */ }}
                if (met || Date.now() > until) resolve(met); else setTimeout(look, 15);
            }};
            look();
        }})"""
        for _ in range(3):
            try:
                met = self.ask(script)
                break
            except RuntimeError as error:
                # Navigation discards the promises of the old page.
                if "navigated" not in str(error) and "context" not in str(error):
                    raise
        if not met:
            said = "\n".join([*self.complaints(), self.ask("document.body.innerText")[:3000]])
            raise TimeoutError(f"not so: {condition}\n{said}")

    def middle(self, selector: str) -> tuple[float, float]:
        """Scroll to an element and return its middle in the window."""
        found = self.ask(
            f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{ block: "nearest" }}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        )
        return found[0], found[1]

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click an element with the mouse."""
        x, y = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector: str) -> None:
        """Touch an element with one finger."""
        x, y = self.middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str) -> None:
        """Press a key: "Tab", "ArrowRight", "Enter", "Escape"."""
        key: dict[str, Any] = {"key": name, "code": name, "windowsVirtualKeyCode": _CODES[name]}
        key |= {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def attribute(self, selector: str, name: str) -> list[str]:
        """An attribute of all elements that match a selector."""
        script = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.getAttribute({json.dumps(name)}))"
        found: list[str] = self.ask(script)
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings in the console, and uncaught exceptions."""
        found = []
        for event in list(self._events):
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                thrown = details["exceptionDetails"]
                found.append(thrown.get("exception", {}).get("description", thrown["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in _COMPLAINTS:
                found.append(json.dumps(details["args"])[:500])
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in _COMPLAINTS:
                found.append(json.dumps(details["entry"])[:500])
        return found

    def requested(self) -> list[str]:
        """The addresses that the page requested."""
        asked = [e["params"] for e in list(self._events) if e["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in asked]

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)
