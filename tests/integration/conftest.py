from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.browser import Browser, find_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("chromium is not installed")
    with Browser(path, tmp_path_factory.mktemp("profile")) as browser:
        yield browser
