"""What `valkey-cli [-e] [-h HOST] [-p PORT] [-a PASSWORD] COMMAND...` does, for machines that have none."""

import argparse
import os
import sys

import redis


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-h", default="127.0.0.1", dest="host")
    parser.add_argument("-p", default=6379, type=int, dest="port")
    parser.add_argument("-a", default=os.environ.get("REDISCLI_AUTH"), dest="password")
    parser.add_argument("-e", action="store_true", help="An error is one: always, here.")
    parser.add_argument("--no-auth-warning", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    client = redis.Redis(given.host, given.port, password=given.password, protocol=2)
    try:
        answer = client.execute_command(*given.command)  # type: ignore[no-untyped-call]  # is untyped
    except redis.RedisError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{'PONG' if answer is True else answer}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
