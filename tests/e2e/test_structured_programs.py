"""The programs and the page that show schemas and predictions do what they say, against a whole stack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.stacks import Clients
from tests.integration.test_examples import ROOT, output, start

pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

# A few hundred tokens of the default model.
ANSWER_S = 120.0

CODE = 'def area(w, h):\n    """Return the area of a rectangle."""\n    return w * h\n'
PAGE = ROOT / "docs" / "structured-output.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


async def test_extract(clients: Clients) -> None:
    out, err = await output(await start("extract", clients.stack.address("gateway")), patience_s=ANSWER_S)
    contact, counts, _ = out.rsplit("\n", 2)
    assert re.fullmatch(r".* of .*, .*", contact, re.DOTALL)
    total, forced = map(int, re.findall(r"\d+", counts))
    assert 0 < forced < total
    assert err == ""


async def test_edit(clients: Clients, tmp_path: Path) -> None:
    file, instruction = tmp_path / "area.py", "Rename w to width and h to height."
    file.write_text(CODE)
    out, err = await output(
        await start("edit", clients.stack.address("gateway"), file, instruction), patience_s=ANSWER_S
    )
    prompt = f"{instruction} Write only the complete file.\n\n{CODE}"
    plain = await clients.main.chat(prompt, max_tokens=512, temperature=0.0, speculation="off")
    assert out == f"{plain.text}\n"
    assert f"{plain.usage.output_tokens} tokens, " in err
    rounds = int(re.findall(r"in (\d+) rounds", err)[0])
    assert rounds < plain.speculation.rounds


@pytest.mark.parametrize("code", BLOCKS, ids=["schema", "prediction"])
async def test_the_python_of_the_page(clients: Clients, code: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(code.replace("127.0.0.1:50051", clients.stack.address("gateway")))
    out, err = await output(await start(program), patience_s=ANSWER_S)
    assert out
    assert err == ""
