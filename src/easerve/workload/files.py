"""Media that a data set names: files become data URLs, so that a server reads no file of ours."""

import base64
import binascii
import io
import re
import wave
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import Image

from easerve.workload.content import data_url, input_audio

MAX_FILE_BYTES = 256 << 20
MAX_SHOWN = 80
KINDS = {
    "image": ("images", "image_files"),
    "video": ("videos", "video"),
    "audio": ("audio", "audios"),
}
"""Of media, and what a line of a data set calls several of them."""
VIDEOS = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/quicktime",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".avi": "video/x-msvideo",
}
SOUNDS = {
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".m4a": "audio/mp4",
}
INPUT_AUDIO = {"audio/wav": "wav", "audio/mpeg": "mp3"}
"""What OpenAI's API takes; servers take the rest as ``audio_url``."""
DATA_HEAD = re.compile(r"data:(?P<kind>[a-z]+)/[\w.+-]+(;[\w=.+-]+)*;base64")
Part = dict[str, Any]


def part(given: Any, folder: Path) -> Part:
    """A part of a message's content, as servers take it.

    ``{"type": "image", "image": "a.png"}`` and the like, as vLLM's bench reads them, become
    OpenAI's parts. What is no medium is returned as it is. Raises ValueError for media that cannot
    be used.
    """
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise ValueError(f"a part of a content needs a type: {_short(given)}")
    kind = given["type"].removesuffix("_url")
    if kind not in KINDS:
        return given
    # {"image_url": {"url": …}}, or for short {"image_url": …}, {"image": …}
    source = given.get(given["type"])
    more = dict(source) if isinstance(source, dict) else {}
    url = more.pop("url", None) if isinstance(source, dict) else source
    if not isinstance(url, str) or not url:
        raise ValueError(f"a part {given['type']} needs a path or URL: {_short(given)}")
    rest = {name: value for name, value in given.items() if name not in ("type", given["type"])}
    return {**_sent(kind, url, folder, more), **rest}


def _sent(kind: str, source: str, folder: Path, more: Part) -> Part:
    """``more``: of the part, beside its URL."""
    scheme = urlsplit(source).scheme.lower()
    if scheme == "data":
        _check_data(kind, source)
    elif scheme not in ("http", "https"):
        media_type, content = _read(kind, folder / _path(source))
        if media_type in INPUT_AUDIO:
            form = INPUT_AUDIO[media_type]
            return {"type": "input_audio", "input_audio": input_audio(content, form)}
        source = data_url(media_type, content)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": source, **more}}


def _path(source: str) -> str:
    url = urlsplit(source)
    if url.scheme.lower() == "file":
        return unquote(url.path)
    if "://" in source:
        raise ValueError(f"{_short(source)} is neither a path nor a URL of file, http(s) or data")
    return source


def _check_data(kind: str, url: str) -> None:
    head, comma, content = url.partition(",")
    found = DATA_HEAD.fullmatch(head)
    if not comma or found is None or found["kind"] != kind:
        raise ValueError(f"{_short(url)} is not like data:{kind}/...;base64,...")
    try:
        base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_short(url)}: {error}") from None


def _read(kind: str, path: Path) -> tuple[str, bytes]:
    """Media type and bytes of a file."""
    try:
        if not path.is_file():
            raise ValueError(f"{path} is {'no file' if path.exists() else 'not there'}")
        num_bytes = path.stat().st_size
        if not 0 < num_bytes <= MAX_FILE_BYTES:
            most = f"{MAX_FILE_BYTES >> 20} MiB"
            raise ValueError(
                f"{path} has {num_bytes} bytes; more than 0 and {most} at most is taken"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    return _media_type(kind, path, content), content


def _media_type(kind: str, path: Path, content: bytes) -> str:
    if kind == "image":
        return _picture_type(path, content)
    known = VIDEOS if kind == "video" else SOUNDS
    media_type = known.get(path.suffix.lower())
    if media_type is None:
        raise ValueError(f"{path} is none of {', '.join(known)}")
    if media_type == "audio/wav":
        try:
            wave.open(io.BytesIO(content)).close()
        except (wave.Error, EOFError) as error:
            raise ValueError(f"{path} is no WAV: {str(error) or 'it ends too soon'}") from None
    return media_type


def _picture_type(path: Path, content: bytes) -> str:
    """By what is in it, not by its name. The head is read; the pixels are the server's work."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            media_type = Image.MIME.get(image.format or "")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no picture: {error}") from None
    if media_type is None:
        raise ValueError(f"{path} is a picture of a kind without a media type")
    return media_type


def _short(given: Any) -> str:
    text = str(given)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
