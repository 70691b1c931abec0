"""An engine without a model: listens on the socket it is told, and behaves as it is told.

Run as ``python -m tests.cluster.dummy_engine SOCKET [WORD ...]``. Prints ``pid N`` for each of its
processes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory

LIFETIME_S = 60


def main() -> None:
    address, *words = sys.argv[1:]
    print("pid", os.getpid(), flush=True)
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(words.count("child")):
        argv = ["sleep", str(LIFETIME_S + number)]
        child = subprocess.Popen(argv, start_new_session="session" in words)
        print("pid", child.pid, flush=True)
    if "python-child" in words:
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LIFETIME_S})"])
        print("pid", child.pid, flush=True)
    if "shm" in words:
        kept = SharedMemory(create=True, size=1)
        print("shm", kept.name, flush=True)
    if "exit" in words:
        print("reading the weights\nValueError: no such weights", flush=True)
        sys.exit(3)
    if "silent" in words:
        print("thinking", flush=True)
        time.sleep(LIFETIME_S)
    if "env" in words:
        print("env", os.environ["DUMMY"], flush=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        time.sleep(LIFETIME_S)


if __name__ == "__main__":
    main()
