"""Requests that somebody has written down: a file of JSON lines. A line is one of

    {"messages": [...], "max_tokens": 64}
    {"prompt": "...", "images": ["a.png"], "videos": [...], "audio": [...], "output_tokens": 64}
    {"content": [{"type": "text", "text": "..."}, {"type": "image", "image": "a.png"}]}

The last two are also what vLLM's bench reads (custom, custom_image and custom_audio), which calls
pictures ``image_files``. Lengths of answers are optional, and so is ``at_s``, in every line or in
none: when the request is to be sent, in seconds from the run's start. Media are paths, relative to
the file, or ``file:``, ``http(s):`` or ``data:`` URLs. What a path names is read here and sent as
data (``workload/files``). Keys that are not known are left out, unless they look like media.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from easerve.workload import files
from easerve.workload.content import Options

MAX_LINE_BYTES = 256 << 20  # media may be in it as data
MEDIA_LIKE = ("image", "img", "picture", "photo", "video", "audio", "sound", "speech")

Count = Annotated[int, msgspec.Meta(ge=1)]
OneOrMore = list[str] | str | None


class _Line(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | str | None = None
    prompt: str | None = None
    images: OneOrMore = None
    image_files: OneOrMore = None
    videos: OneOrMore = None
    video: OneOrMore = None
    audio: OneOrMore = None
    audios: OneOrMore = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    output_tokens: Count | None = None
    at_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Row:
    """A line: what is asked, with media as they are written. ``path``: of the file it is in."""

    path: Path
    number: int
    messages: list[dict[str, Any]]
    max_tokens: int | None
    at_s: float | None

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"


def load(path: Path) -> list[Row]:
    """All lines; media are not read yet. Raises ValueError with file and line for one that cannot
    be used, for a file without lines or one that cannot be read.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB"
                    )
                if line.strip():
                    rows.append(_row(path, number, line.removeprefix(b"\xef\xbb\xbf")))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    if not rows:
        raise ValueError(f"{path} has no requests")
    _check_times(rows)
    return rows


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        parsed = _decode(line)
        _check_keys(_decode_keys(line))
        max_tokens = parsed.max_tokens or parsed.max_completion_tokens or parsed.output_tokens
        return Row(path, number, _messages(parsed), max_tokens, parsed.at_s)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _check_keys(given: dict[str, msgspec.Raw]) -> None:
    for key in given:
        if key not in _Line.__struct_fields__ and key.lower().startswith(MEDIA_LIKE):
            raise ValueError(f"{key!r} is not known: media are images, videos or audio")


def _messages(line: _Line) -> list[dict[str, Any]]:
    given = [name for name in ("messages", "content", "prompt") if getattr(line, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"give one of messages, content and prompt, not {' and '.join(given) or 'none'}"
        )
    media = [
        {"type": kind, kind: each}
        for kind, names in files.KINDS.items()
        for name in names
        for each in _several(getattr(line, name))
    ]
    if media and line.prompt is None:
        raise ValueError(f"{given[0]} has its media in it; images, videos and audio go with prompt")
    if line.messages is not None:
        if not line.messages:
            raise ValueError("messages is empty")
        return line.messages
    if line.content is not None:
        return [{"role": "user", "content": line.content}]
    content = [*media, {"type": "text", "text": line.prompt}] if media else line.prompt
    return [{"role": "user", "content": content}]


def _several(given: OneOrMore) -> list[str]:
    return [] if given is None else [given] if isinstance(given, str) else given


def _check_times(rows: list[Row]) -> None:
    if all(row.at_s is None for row in rows):
        return
    previous, at_s = rows[0], 0.0
    for row in rows:
        if row.at_s is None:
            raise ValueError(f"{row.where}: no at_s, which other lines have")
        if row.at_s < at_s:
            raise ValueError(f"{row.where}: at_s is before that of line {previous.number}")
        previous, at_s = row, row.at_s


def select(
    rows: list[Row], num: int, seed: int, *, shuffled: bool = False, oversampled: bool = False
) -> list[Row]:
    """``num`` rows: the first in the file, or in an order that the seed tells.

    Raises ValueError when there are too few, unless ``oversampled``: then all come again in the
    same order, as often as need be. Rows that are not as they were written have no times.
    """
    if num > len(rows) and not oversampled:
        raise ValueError(
            f"{rows[0].path} has {len(rows)} requests, but {num} are asked; let them come again "
            "(oversampling) or ask fewer"
        )
    order = list(rows)
    if shuffled:
        random.Random(f"{seed}:order").shuffle(order)  # noqa: S311 (an order, not secrets)
    chosen = [order[number % len(order)] for number in range(num)]
    if shuffled or num > len(rows):
        chosen = [replace(row, at_s=None) for row in chosen]
    return chosen


def body(row: Row, max_tokens: int, options: Options) -> dict[str, Any]:
    """An OpenAI chat body, its media read. ``max_tokens`` where the row does not say.

    Raises ValueError with file and line for media that cannot be used.
    """
    try:
        messages = [_with_media(message, row.path.parent) for message in row.messages]
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None
    return {
        "messages": messages,
        "max_tokens": row.max_tokens or max_tokens,
        **options.sampling(),
    }


def _with_media(message: dict[str, Any], folder: Path) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [files.part(each, folder) for each in parts]}
