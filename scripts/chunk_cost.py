"""Does the cost of a token grow with the length of the answer? Streams long answers and says.

``python scripts/chunk_cost.py --url URL --model tiny-llava`` against a server that was started with
``--tool-call-parser hermes --enable-auto-tool-choice``. For each way that an answer's chunks are
made: the time per token in the first and in the last quarter, and their ratio.
"""

import argparse
import json
import time
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 4000}},
            "required": ["text"],
        },
    },
}
ROUTES: dict[str, dict[str, Any]] = {
    "text": {},
    "tools given, text answered": {"tools": [TOOL], "tool_choice": "none"},
    "tool call": {"tools": [TOOL], "tool_choice": "required"},
}


def times(url: str, model: str, num_tokens: int, options: dict[str, Any]) -> list[float]:
    """When each chunk with tokens came, in seconds."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **options,
    }
    seen: list[float] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            seen.extend(time.perf_counter() for each in event["choices"] if each.get("token_ids"))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny-llava")
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = {}
    for name, options in ROUTES.items():
        try:
            seen = times(asked.url, asked.model, asked.tokens, options)
        except httpx.HTTPError as error:
            parser.error(f"{asked.url}: {error}")
        quarter = len(seen) // 4
        first = (seen[quarter] - seen[0]) / quarter
        last = (seen[-1] - seen[-1 - quarter]) / quarter
        rows[name] = {"chunks": len(seen), "first_s": first, "last_s": last, "ratio": last / first}
    if asked.json:
        print(json.dumps(rows))
        return
    table = Table("chunks made from", "chunks", "first quarter", "last quarter", "ratio")
    for name, row in rows.items():
        times_ms = (f"{row[key] * 1e3:.2f} ms" for key in ("first_s", "last_s"))
        table.add_row(name, str(row["chunks"]), *times_ms, f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
