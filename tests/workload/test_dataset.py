import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from easerve.workload import dataset, files
from easerve.workload.content import Options
from easerve.workload.dataset import Row, body, load, select
from easerve.workload.synthetic import sound
from tests.workload.test_synthetic import rng

OPTIONS = Options(ignore_eos=False, temperature=None)


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "data.jsonl"
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    )
    return path


def content_of(folder: Path, line: dict[str, Any]) -> Any:
    """Of the one message of the one line."""
    [row] = load(written(folder, line))
    [message] = body(row, 9, OPTIONS)["messages"]
    return message["content"]


def picture(folder: Path, name: str = "a.png", form: str = "PNG") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    Image.new("RGB", (3, 2)).save(folder / name, form)
    return name


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def test_messages_are_sent_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    [row] = load(written(tmp_path, {"messages": messages, "max_tokens": 5, "id": 17}))
    assert body(row, 9, Options()) == {
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "output_tokens"])
def test_lengths_of_answers(tmp_path: Path, name: str) -> None:
    with_length, without = load(written(tmp_path, {"prompt": "a", name: 5}, {"prompt": "b"}))
    assert body(with_length, 9, OPTIONS)["max_tokens"] == 5
    assert body(without, 9, OPTIONS) == {
        "messages": [{"role": "user", "content": "b"}],
        "max_tokens": 9,
    }


@pytest.mark.parametrize("key", ["images", "image_files"])
def test_pictures_are_read_beside_the_file(tmp_path: Path, key: str) -> None:
    name = picture(tmp_path, "pictures/a.png")
    given = [name, str(tmp_path / name), (tmp_path / name).as_uri(), "https://a.example/b.png"]
    parts = content_of(tmp_path, {"prompt": "What?", key: given})
    urls = [part["image_url"]["url"] for part in parts[:-1]]
    assert urls[:3] == [f"data:image/png;base64,{data(tmp_path / name)}"] * 3
    assert urls[3] == "https://a.example/b.png"
    assert parts[-1] == {"type": "text", "text": "What?"}


def test_a_picture_is_what_is_in_it_not_what_it_is_called(tmp_path: Path) -> None:
    [part, _] = content_of(tmp_path, {"prompt": "?", "images": picture(tmp_path, "a.png", "WEBP")})
    assert part["image_url"]["url"].startswith("data:image/webp;base64,")


def test_sounds_and_videos(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(sound(0.01, 1, rng()))
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    (tmp_path / "a.mp4").write_bytes(b"mp4")
    line = {"prompt": "?", "audio": ["a.wav", "a.flac"], "videos": "a.mp4"}
    video, wav, flac, _ = content_of(tmp_path, line)
    assert video == {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{data(tmp_path / 'a.mp4')}"},
    }
    assert wav == {
        "type": "input_audio",
        "input_audio": {"data": data(tmp_path / "a.wav"), "format": "wav"},
    }
    assert flac["audio_url"]["url"].startswith("data:audio/flac;base64,")


def test_vllms_content_in_any_order(tmp_path: Path) -> None:
    name = picture(tmp_path)
    url = f"data:image/png;base64,{data(tmp_path / name)}"
    parts = content_of(
        tmp_path,
        {
            "content": [
                {"type": "text", "text": "Compare"},
                {"type": "image", "image": name},
                {"type": "image_url", "image_url": name},
                {"type": "image_url", "image_url": {"url": name, "detail": "low"}, "uuid": "u"},
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            ]
        },
    )
    plain = {"type": "image_url", "image_url": {"url": url}}
    assert parts[1] == parts[2] == parts[4] == plain
    assert parts[3] == {**plain, "image_url": {"url": url, "detail": "low"}, "uuid": "u"}
    assert [parts[0]["type"], parts[5]["type"]] == ["text", "input_audio"]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ("\udcff{}", "line 3"),
        ({}, "give one of messages, content and prompt, not none"),
        ({"prompt": "a", "messages": []}, "not messages and prompt"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [1]}, r"Expected `object`, got `int` - at `\$.messages"),
        ({"messages": [{}], "images": ["a"]}, "messages has its media in it"),
        ({"prompt": 3}, r"Expected `str . null`, got `int` - at `\$.prompt`"),
        ({"prompt": "a", "max_tokens": 0}, "Expected `int` >= 1"),
        ({"prompt": "a", "at_s": -1}, "Expected `float` >= 0"),
        ('{"prompt": "a", "at_s": NaN}', "malformed"),
        ('{"prompt": "a", "at_s": 1e999}', "out of range"),
        ({"prompt": "a", "image": "a.png"}, "'image' is not known: media are images"),
        ({"prompt": "a", "Video_paths": []}, "'Video_paths' is not known"),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, line: Any, wrong: str) -> None:
    path = tmp_path / "data.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(f'\ufeff{{"prompt": "a"}}\n\n{text}\n'.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=wrong) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("gone.png", "gone.png is not there"),
        (".", "is no file"),
        ("/dev/zero", "/dev/zero is no file"),
        ("empty.png", "has 0 bytes; more than 0 and 256 MiB at most"),
        ("text.png", "text.png is no picture: cannot identify"),
        ("ftp://a.example/a.png", "neither a path nor a URL of file, http"),
        ("data:image/png,abc", "is not like data:image/...;base64,"),
        ("data:video/mp4;base64,AAAA", "is not like data:image/...;base64,"),
        ("data:image/png;base64,A=A", "data:image/png;base64,A=A: "),
        ("", "needs a path or URL"),
    ],
)
def test_media_that_cannot_be_used(tmp_path: Path, given: str, wrong: str) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    path = written(tmp_path, {"prompt": "?", "images": [given]})
    with pytest.raises(ValueError, match=wrong) as error:
        body(load(path)[0], 9, OPTIONS)
    assert str(error.value).startswith(f"{path}, line 1: ")


@pytest.mark.parametrize(
    ("key", "name", "wrong"),
    [
        ("videos", "a.png", "is none of .mp4"),
        ("audio", "a.txt", "is none of .wav"),
        ("audio", "a.wav", "is no WAV: "),
    ],
)
def test_other_media_that_cannot_be_used(tmp_path: Path, key: str, name: str, wrong: str) -> None:
    (tmp_path / name).write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=wrong):
        content_of(tmp_path, {"prompt": "?", key: [name]})


def test_parts_that_are_none(tmp_path: Path) -> None:
    for part in ({}, {"text": "a"}):
        with pytest.raises(ValueError, match="line 1: a part of a content needs a type"):
            content_of(tmp_path, {"content": [part]})
    with pytest.raises(ValueError, match="needs a path or URL"):
        content_of(tmp_path, {"content": [{"type": "image"}]})


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="bytes; more than 0"):
        content_of(tmp_path, {"prompt": "?", "images": picture(tmp_path)})
    monkeypatch.setattr(dataset, "MAX_LINE_BYTES", 20)
    with pytest.raises(ValueError, match="line 2: longer than 0 MiB"):
        load(written(tmp_path, {"prompt": "a"}, {"prompt": "a" * 20}))


def test_a_file_without_requests_or_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no requests"):
        load(written(tmp_path, "\n  "))
    with pytest.raises(ValueError, match=r"gone: No such file"):
        load(tmp_path / "gone")
    with pytest.raises(ValueError, match="Is a directory"):
        load(tmp_path)


def test_times_are_in_every_line_or_in_none(tmp_path: Path) -> None:
    timed = load(written(tmp_path, {"prompt": "a", "at_s": 0}, {"prompt": "b", "at_s": 1.5}))
    assert [row.at_s for row in timed] == [0, 1.5]
    with pytest.raises(ValueError, match="line 2: no at_s, which other lines have"):
        load(written(tmp_path, {"prompt": "a", "at_s": 0}, {"prompt": "b"}))
    with pytest.raises(ValueError, match="line 2: at_s is before that of line 1"):
        load(written(tmp_path, {"prompt": "a", "at_s": 2}, {"prompt": "b", "at_s": 1}))


def rows(num: int, timed: bool = False) -> list[Row]:
    return [Row(Path("a"), n, [], None, float(n) if timed else None) for n in range(num)]


def numbers(selected: list[Row]) -> list[int]:
    return [row.number for row in selected]


def test_rows_are_taken_in_order_or_in_the_seeds() -> None:
    assert numbers(select(rows(9), 5, 1)) == [0, 1, 2, 3, 4]
    shuffled = numbers(select(rows(9), 9, 1, shuffled=True))
    assert sorted(shuffled) == list(range(9)) != shuffled
    assert numbers(select(rows(9), 5, 1, shuffled=True)) == shuffled[:5]
    assert numbers(select(rows(9), 9, 2, shuffled=True)) != shuffled


def test_rows_come_again_only_if_they_may() -> None:
    assert numbers(select(rows(3), 7, 1, oversampled=True)) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="a has 3 requests, but 4 are asked"):
        select(rows(3), 4, 1)


def test_rows_that_are_not_as_written_have_no_times() -> None:
    assert [row.at_s for row in select(rows(3, timed=True), 2, 1)] == [0, 1]
    for more in ({"shuffled": True}, {"oversampled": True}):
        chosen = select(rows(3, timed=True), 4 if "oversampled" in more else 3, 1, **more)
        assert {row.at_s for row in chosen} == {None}
    assert [row.at_s for row in select(rows(3, timed=True), 3, 1, oversampled=True)] == [0, 1, 2]
