"""What a client gets back: OpenAI's objects, whole or in chunks, made from an answer's pieces."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from easerve.engines.protocol import Delta
from easerve.serve.job import Job
from easerve.serve.request import Asked

BLANK = "\x00blank\x00"  # stands where the text goes


def event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass(slots=True)
class Answer:
    """The answer to one request. Choices are numbered over all its jobs."""

    asked: Asked
    request_id: str
    jobs: Sequence[Job]
    created: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)
    _num_tokens: dict[int, int] = field(default_factory=dict)
    _details: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _frames: dict[int, list[bytes]] = field(default_factory=dict)

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    # To be said by each kind of answer ---------------------------------------------------------

    def opening(self) -> dict[str, Any] | None:
        """The choice of a chunk that comes before the first piece of a choice."""
        return None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A piece of text as a chunk's choice."""
        raise NotImplementedError

    def joined(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """All pieces of text of a choice."""
        raise NotImplementedError

    def add_prompt(self, answer: dict[str, Any]) -> None:
        """The prompt's tokens at their place in an answer, or in the first chunk of a choice."""
        raise NotImplementedError

    # The same for all ---------------------------------------------------------------------------

    def chunks(self, choice: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks that a piece makes; none when it says nothing to the client."""
        if choice not in self._opened and (opening := self.opening()) is not None:
            yield self._chunk(choice, opening)
        self._count(choice, delta)
        if delta.choice is not None:
            content = dict(delta.choice)
            if "delta" in content:  # the role has been said
                content["delta"] = {k: v for k, v in content["delta"].items() if k != "role"}
            if not self._says_something(content):
                return
        elif delta.usage is not None:
            return
        else:
            content = self.piece(delta)
        yield self._chunk(choice, self._with_token_ids(content, delta.token_ids))

    def events(self, choice: int, delta: Delta) -> bytes:
        """The server-sent events that a piece makes.

        Between the first piece and the last one, events differ in their text alone: that is put
        into what the first of them looked like.
        """
        frame = self._frames.get(choice)
        if frame is None or delta.finish_reason or delta.choice is not None or delta.usage:
            if choice in self._opened and self._is_plain and choice not in self._frames:
                blank = event(self._chunk(choice, self.piece(Delta(BLANK))))
                self._frames[choice] = blank.split(msgspec.json.encode(BLANK))
            return b"".join(map(event, self.chunks(choice, delta)))
        self._count(choice, delta)
        before, after = frame
        return before + msgspec.json.encode(delta.text) + after

    @property
    def _is_plain(self) -> bool:
        """Whether a chunk says nothing of its tokens but their text."""
        asked = self.asked
        return not (asked.return_token_ids or asked.continuous_usage) and (
            asked.num_top_logprobs is None
        )

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage()}

    def whole(self, pieces: Sequence[tuple[int, Delta]]) -> dict[str, Any]:
        """The whole response."""
        by_choice: dict[int, list[Delta]] = {}
        for choice, delta in pieces:
            self._count(choice, delta)
            by_choice.setdefault(choice, []).append(delta)
        choices = []
        for choice, deltas in sorted(by_choice.items()):
            content = dict(deltas[-1].choice or self.joined(deltas))
            token_ids = [token for delta in deltas for token in delta.token_ids]
            choices.append({**self._with_token_ids(content, token_ids), "index": choice})
        answer = {**self._head(self.kind), "choices": choices, "usage": self.usage()}
        if self.asked.return_token_ids:
            self.add_prompt(answer)
        return answer

    def usage(self) -> dict[str, Any]:
        """Tokens of every prompt, and of every choice."""
        prompt = sum(len(job.prompt.token_ids) for job in self.jobs if job.prompt)
        usage = _usage(prompt, sum(self._num_tokens.values()))
        if self._details:
            reasoning = sum(details["reasoning_tokens"] for details in self._details.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def prompt_token_ids(self, choice: int) -> Sequence[int]:
        prompt = self.jobs[choice // self.asked.num_choices].prompt
        return prompt.token_ids if prompt else ()

    def _count(self, choice: int, delta: Delta) -> None:
        self._num_tokens[choice] = delta.num_tokens(self._num_tokens.get(choice, 0))
        if details := (delta.usage or {}).get("completion_tokens_details"):
            self._details[choice] = details

    def _says_something(self, content: Mapping[str, Any]) -> bool:
        """Engines also send chunks that only carry token ids, which are asked for to count."""
        said = content.get("text") or any(content.get("delta", {}).values())
        return bool(
            said
            or content["finish_reason"]
            or content.get("logprobs")
            or (self.asked.return_token_ids and content.get("token_ids"))
        )

    def _with_token_ids(self, content: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        content.pop("token_ids", None)
        content.pop("prompt_token_ids", None)
        if self.asked.return_token_ids:
            content["token_ids"] = list(token_ids)
        return content

    def _chunk(self, choice: int, content: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_kind), "choices": [{**content, "index": choice}]}
        if self.asked.return_token_ids and choice not in self._opened:
            self.add_prompt(chunk)
        self._opened.add(choice)
        if self.asked.continuous_usage:
            num_prompt = len(self.prompt_token_ids(choice))
            chunk["usage"] = _usage(num_prompt, self._num_tokens.get(choice, 0))
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
        }


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, delta: Delta) -> dict[str, Any]:
        return {"delta": {"content": delta.text}, **self._ending(delta, delta.logprobs)}

    def joined(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        content = "".join(delta.text for delta in deltas)
        logprobs = [each for delta in deltas for each in delta.logprobs or ()]
        return {
            "message": {"role": "assistant", "content": content},
            **self._ending(deltas[-1], logprobs),
        }

    def add_prompt(self, answer: dict[str, Any]) -> None:
        answer["prompt_token_ids"] = list(self.prompt_token_ids(0))

    def _ending(self, delta: Delta, logprobs: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        number, wanted = self.asked.num_top_logprobs, None
        if number is not None:
            wanted = {"content": [_top(each, number) for each in logprobs or ()]}
        return {
            "logprobs": wanted,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def piece(self, delta: Delta) -> dict[str, Any]:
        return self.joined([delta])

    def joined(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return {
            "text": "".join(delta.text for delta in deltas),
            "logprobs": None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def add_prompt(self, answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = list(self.prompt_token_ids(choice["index"]))


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _top(entry: Mapping[str, Any], number: int) -> dict[str, Any]:
    """An engine gives one alternative where none is asked for."""
    return {**entry, "top_logprobs": list(entry["top_logprobs"])[:number]}
