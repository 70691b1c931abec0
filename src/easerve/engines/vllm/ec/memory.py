"""The memory of a bundle: an anonymous file in memory, sealed, passed as a file descriptor.

Its writer fills it by ``writev`` (two to three times as fast as filling a fresh mapping), then
seals it: it can neither change nor shrink, so no reader can be made to fault. Readers map it and
copy nothing. It goes when the last descriptor and the last mapping are gone.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from easerve.engines.vllm.ec.messages import ALIGNMENT, Item, MessageError

if TYPE_CHECKING:
    import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
MAX_PIECES = 512  # of one writev; the kernel takes 1024


class Memory:
    """Owns the descriptor ``fd`` of a file of ``num_bytes``, and its mapping once there is one.

    Pickled (for vLLM's workers in other processes) it is the way to the descriptor by /proc, so its
    owner has to keep it for as long as that may be read.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes

    @classmethod
    def of(cls, contents: Sequence[memoryview]) -> "Memory":
        """New memory with these contents of bytes, each aligned (see ``messages.layout``)."""
        fd = os.memfd_create("easerve-bundle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _write(fd, contents)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def received(cls, fd: int) -> "Memory":
        """Memory that a peer handed over; the descriptor is closed if it is not sealed memory."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            sealed = False
        if not sealed:
            os.close(fd)
            raise MessageError("the bundle is no sealed memory")
        return cls(fd, os.fstat(fd).st_size)

    @cached_property
    def mapping(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_COPY)

    def tensor(self, item: Item) -> "torch.Tensor":
        """An embedding of the bundle, not copied; the mapping lives as long as the tensor."""
        import torch

        content = torch.frombuffer(
            self.mapping, dtype=torch.uint8, count=item.num_bytes, offset=item.offset
        )
        return view_of(content, item)

    def __reduce__(self) -> tuple[Callable[..., "Memory"], tuple[int, int, int]]:
        return _opened, (os.getpid(), self.fd, self.num_bytes)

    def __del__(self) -> None:
        os.close(self.fd)


def _opened(pid: int, fd: int, num_bytes: int) -> Memory:
    return Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), num_bytes)


def _write(fd: int, contents: Sequence[memoryview]) -> None:
    pieces = []
    for content in contents:
        pieces += [content, memoryview(bytes(-content.nbytes % ALIGNMENT))]
    if pieces:
        pieces.pop()  # nothing comes after the last item
    for begin in range(0, len(pieces), MAX_PIECES):
        some = pieces[begin : begin + MAX_PIECES]
        while some:
            written = os.writev(fd, some)
            while some and written >= some[0].nbytes:
                written -= some.pop(0).nbytes
            if written:
                some[0] = some[0][written:]


def view_of(content: "torch.Tensor", item: Item) -> "torch.Tensor":
    """The embedding that these bytes are."""
    import torch

    return content.view(getattr(torch, item.dtype)).view(item.shape)
