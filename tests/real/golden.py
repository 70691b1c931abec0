"""Hugging Face's own answers: reads requests as JSON lines, writes token ids as JSON lines.

Run apart from the tests, with the engines' PYTHONPATH: torch and transformers stay out of pytest.
"""

import base64
import io
import json
import sys
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration


def pictures(messages: list[dict[str, Any]]) -> list[Image.Image]:
    urls = [
        part["image_url"]["url"]
        for message in messages
        for part in (message["content"] if isinstance(message["content"], list) else [])
        if part["type"] == "image_url"
    ]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def template_form(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "image"} if part["type"] == "image_url" else part for part in message["content"]
    ]
    return {**message, "content": parts}


def main() -> None:
    folder, max_tokens = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(2)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    for line in sys.stdin:
        messages = json.loads(line)
        prompt = processor.apply_chat_template(
            [template_form(message) for message in messages], add_generation_prompt=True
        )
        inputs = processor(text=prompt, images=pictures(messages) or None, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        num_prompt = inputs.input_ids.shape[1]
        tokens = output[0].tolist()
        print(json.dumps({"prompt": tokens[:num_prompt], "answer": tokens[num_prompt:]}))


if __name__ == "__main__":
    main()
