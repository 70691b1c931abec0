"""An engine that only listens: ``python -m tests.cli.dummy_engine ... --uds SOCKET ...``."""

import socket
import sys
import time

LIFETIME_S = 60


def main() -> None:
    address = sys.argv[sys.argv.index("--uds") + 1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        time.sleep(LIFETIME_S)


if __name__ == "__main__":
    main()
