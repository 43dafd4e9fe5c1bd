"""The written list of skips is enforced."""

from __future__ import annotations

import pytest

from tests.plugins.skips import AllowedSkip, parse

pytest_plugins = ["pytester"]

CASES = """
import pytest

def test_runs(): pass

@pytest.mark.skip(reason="no such tool here")
def test_listed(): pass

@pytest.mark.skip(reason="did not feel like it")
def test_not_listed(): pass

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure(): assert False
"""


def run(pytester: pytest.Pytester, allowed: str) -> pytest.RunResult:
    pytester.mkdir("tests").joinpath("allowed_skips.txt").write_text(allowed)
    pytester.makepyfile(test_cases=CASES)
    return pytester.runpytest_subprocess("-p", "tests.plugins.skips", "-p", "no:asyncio")


def test_an_unlisted_skip_fails_and_a_listed_one_does_not(pytester: pytest.Pytester) -> None:
    result = run(pytester, "# why\n*::test_listed | no such tool\n")
    result.assert_outcomes(passed=1, skipped=1, failed=0, errors=1, xfailed=1)
    result.stdout.fnmatch_lines(["*did not feel like it*not listed in tests/allowed_skips.txt*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_all_listed_passes(pytester: pytest.Pytester) -> None:
    result = run(pytester, "*::test_listed | no such tool\n*::test_not_listed | feel like it\n")
    result.assert_outcomes(passed=1, skipped=2, xfailed=1)
    assert result.ret == pytest.ExitCode.OK


def test_a_file_skipped_whole_fails_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_whole="import pytest\npytest.importorskip('no_such_module_at_all')\n")
    result = run(pytester, "*::test_* | e\n")
    result.stdout.fnmatch_lines(["*not listed in tests/allowed_skips.txt*"])
    assert result.ret != pytest.ExitCode.OK


def test_a_line_without_a_reason_is_refused() -> None:
    assert parse("a | b") == (AllowedSkip("a", "b"),)
    with pytest.raises(ValueError, match="is not `node id pattern"):
        parse("tests/test_a.py")
