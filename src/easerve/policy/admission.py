"""What may come in at all: decided when a request is received, before any work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """A bound on what the server holds at once."""

    max_requests: int
    max_bytes: int

    def admits(self, num_requests: int, num_bytes: int, new_bytes: int) -> bool:
        """Whether one more request of ``new_bytes`` fits beside the ``num_requests`` held.

        A single request larger than the byte bound is let in when the server is empty: the
        bound is about the sum, and the size of one body is bounded by the API.
        """
        if num_requests >= self.max_requests:
            return False
        return num_requests == 0 or num_bytes + new_bytes <= self.max_bytes
