import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from easerve.engines.partition import mps
from easerve.engines.partition.mps import Control, Free, Split
from easerve.engines.partition.sides import DriverError

UUID = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
LSPART = """\
GPU           Partition    free    used    free    used    clients
                           chunk   chunk   SM      SM
GPU-0a0b0c0d  -            2       8       16      64      -
GPU-74d43ed3  -            16      0       132     0       -
GPU-74d43ed3  Dx4AAAAAAAAA -       7       -       56      Yes
"""


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(params=[socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def daemon(pipes: Path, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, request.param) as listener:
        listener.bind(str(pipes / "control"))
        listener.listen()
        yield listener


def program(folder: Path, *answers: str, code: int = 0) -> str:
    """A control program that gives one answer after the other, and writes down its orders."""
    for number, answer in enumerate(answers):
        (folder / f"answer{number}").write_text(answer)
    path = folder / "control-program"
    path.write_text(
        f"#!/bin/sh\ncd {folder}\n"
        'read -r line; echo "$CUDA_MPS_PIPE_DIRECTORY: $line" >> orders\n'
        f"cat answer$(($(wc -l < orders) - 1)); exit {code}\n"
    )
    path.chmod(0o700)
    return str(path)


def orders(folder: Path) -> list[str]:
    return [line.split(": ")[1] for line in (folder / "orders").read_text().splitlines()]


# The daemon --------------------------------------------------------------------------------------


def test_the_folder_of_pipes_is_the_environments_or_the_drivers_own() -> None:
    assert mps.pipes_of({}) == Path("/tmp/nvidia-mps")
    assert mps.pipes_of({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}) == Path("/run/mps")


def test_a_daemon_that_listens_is_alive_whatever_its_socket(
    pipes: Path, daemon: socket.socket
) -> None:
    assert mps.alive(pipes)


def test_a_socket_that_was_left_behind_is_no_daemon(pipes: Path, daemon: socket.socket) -> None:
    daemon.close()
    assert not mps.alive(pipes)


def test_without_a_socket_there_is_no_daemon(pipes: Path) -> None:
    assert not mps.alive(pipes)
    assert not mps.alive(pipes / "missing")


@pytest.mark.parametrize(
    ("line", "static"),
    [
        ("nvidia-cuda-mps-control\0-d\0", False),
        ("/usr/bin/nvidia-cuda-mps-control\0-d\0-S\0", True),
        ("nvidia-cuda-mps-control\0-f\0--static-partitioning\0", True),
        ("somebody\0-S\0", None),
    ],
)
def test_the_mode_is_told_by_the_daemons_command_line(
    pipes: Path, line: str, static: bool | None
) -> None:
    (pipes / "nvidia-cuda-mps-control.pid").write_text("42\n")
    (pipes / "proc/42").mkdir(parents=True)
    (pipes / "proc/42/cmdline").write_text(line)
    assert mps.is_static(pipes, pipes / "proc") is static


def test_the_mode_of_a_daemon_that_cannot_be_seen_is_unknown(pipes: Path) -> None:
    assert mps.is_static(pipes) is None
    (pipes / "nvidia-cuda-mps-control.pid").write_text("no number")
    assert mps.is_static(pipes) is None


def test_a_daemon_runs_in_the_foreground() -> None:
    assert mps.command(static=False) == ["nvidia-cuda-mps-control", "-f"]
    assert mps.command(static=True) == ["nvidia-cuda-mps-control", "-f", "-S"]


def test_the_daemon_sees_every_gpu_and_caps_nobody() -> None:
    given = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_MPS_SM_PARTITION": "x/y",
    }
    assert mps.daemon_environment(given, Path("/run/a/mps"), Path("/run/a/log")) == {
        "PATH": "/bin",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/a/mps",
        "CUDA_MPS_LOG_DIRECTORY": "/run/a/log",
    }


def test_a_path_that_is_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(DriverError, match="too long for a socket"):
        mps.daemon_environment({}, Path("/run") / ("a" * 100), Path("/log"))


def test_clients_have_the_folder_eight_connections_and_no_cap() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_MPS_SM_PARTITION": "x/y",
    }
    shared = {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/a",
        "CUDA_MPS_LOG_DIRECTORY": "/log",
    }
    assert mps.client_environment(given, Path("/run/a"), Path("/log")) == shared
    assert mps.client_environment(given, Path("/run/a"), Path("/log"), f"{UUID}/Dx4") == {
        **shared,
        "CUDA_MPS_SM_PARTITION": f"{UUID}/Dx4",
    }
    assert mps.client_environment(given, Path("/run/a"), Path("/log"), below_normal=True) == {
        **shared,
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }


# Static partitions -------------------------------------------------------------------------------


def test_free_chunks_are_those_of_the_gpu(pipes: Path) -> None:
    control = Control(pipes, program(pipes, LSPART))
    assert control.free(UUID) == Free(16, 132)
    assert (pipes / "orders").read_text() == f"{pipes}: lspart\n"


@pytest.mark.parametrize(
    ("encode_sms", "encode", "prefill"), [(None, 8, 8), (24, 3, 13), (1, 1, 15), (500, 15, 1)]
)
def test_a_gpu_is_split_into_two_partitions(
    pipes: Path, encode_sms: int | None, encode: int, prefill: int
) -> None:
    answers = (LSPART, f"{UUID}/Dx4AA\n", f"Partition {UUID}/Cx4AA created\n")
    split = Control(pipes, program(pipes, *answers)).split(UUID, encode_sms)
    assert split == Split(f"{UUID}/Dx4AA", f"{UUID}/Cx4AA")
    assert orders(pipes) == [
        "lspart",
        f"sm_partition add {UUID} {encode}",
        f"sm_partition add {UUID} {prefill}",
    ]


def test_half_a_split_is_undone(pipes: Path) -> None:
    control = Control(pipes, program(pipes, LSPART, f"{UUID}/Dx4AA\n", "Failed to create\n", ""))
    with pytest.raises(DriverError, match=r"sm_partition add .* 8: the daemon said 'Failed to"):
        control.split(UUID)
    assert orders(pipes)[-1] == f"sm_partition rm {UUID} Dx4AA"


def test_a_gpu_whose_chunks_are_taken_is_not_split(pipes: Path) -> None:
    table = "GPU-74d43ed3 - 1 15 8 120 -\n"
    with pytest.raises(DriverError, match="has 1 free chunks of SMs; it takes two"):
        Control(pipes, program(pipes, table)).split(UUID)


def test_a_daemon_without_partitions_is_told_apart(pipes: Path) -> None:
    with pytest.raises(DriverError, match="lspart: the daemon said 'Unknown command'; static"):
        Control(pipes, program(pipes, "Unknown command\n")).free(UUID)


def test_a_control_program_that_fails_says_why(pipes: Path) -> None:
    with pytest.raises(DriverError, match="quit: the daemon said 'Cannot find MPS control"):
        Control(pipes, program(pipes, "Cannot find MPS control daemon", code=1)).quit()


def test_a_control_program_that_is_missing_or_slow_is_named(
    pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverError, match="no-such-program is not installed"):
        Control(pipes, "no-such-program").quit()
    with pytest.raises(DriverError, match="Permission denied"):
        Control(pipes, str(pipes)).quit()
    monkeypatch.setattr(mps, "ASK_S", 0.01)
    slow = pipes / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 5\n")
    slow.chmod(0o700)
    with pytest.raises(DriverError, match="timed out"):
        Control(pipes, str(slow)).quit()


def test_a_pipe_folder_of_the_default_length_is_short_enough() -> None:
    assert len(os.fsencode(mps.DEFAULT_PIPES / "control_privileged")) < mps.LONGEST_SOCKET
