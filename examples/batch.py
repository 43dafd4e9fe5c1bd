"""Answer each file, 16 at once, with a progress bar: python examples/batch.py HOST:PORT OUT FILE...

The answer to FILE is written to the directory OUT. A file whose answer is there is skipped, so a batch can be
started again. The bar needs rich: pip install 'galley[cli]'.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.progress import Progress

from galley import AsyncClient, GalleyRpcError, ResourceExhaustedError, Result

AT_ONCE = 16


async def main(address: str, out: str, files: list[str]) -> int:
    failed: list[str] = []
    places = asyncio.Semaphore(AT_ONCE)
    with Progress() as progress:
        bar = progress.add_task("answers", total=len(files))

        async def work(client: AsyncClient, source: Path, target: Path) -> None:
            async with places:
                try:
                    if not target.exists():
                        target.write_text((await answer(client, source.read_text())).text)
                except (GalleyRpcError, OSError, ValueError) as error:
                    failed.append(f"{source}: {error}")
                progress.advance(bar)

        async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
            for file in map(Path, files):
                tasks.create_task(work(client, file, Path(out) / file.name))
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


async def answer(client: AsyncClient, text: str) -> Result:
    while True:
        try:
            return await client.chat(text, max_tokens=128, temperature=0.0)
        except ResourceExhaustedError as error:
            if error.retry_after_s is None:
                raise
            await asyncio.sleep(error.retry_after_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("files", metavar="FILE", nargs="+")
    sys.exit(asyncio.run(main(**vars(parser.parse_args()))))
