"""Write tiny image models with seeded random weights, to test what ``models/tiny-llava`` cannot.

``next`` is LLaVA-v1.6 (LLaVA-NeXT): a picture is cut into tiles, so the number of its tokens
depends on its size and aspect ratio. ``pixtral`` is Pixtral-12B in the Hugging Face format: one
token ends each row of patches, so a picture's placeholder holds tokens that no embedding replaces.
``mistral3`` is Mistral Small 3.1, which has the same tower.

Tokenizer, chat template, text model and picture normalisation are those of ``models/tiny-llava``.
The answers mean nothing, but they depend on the pictures. Where torchvision is built for another
torch, this needs ``PYTHONPATH=src/easerve/engines/vllm/site``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralProcessor,
    PixtralVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from scripts import checkpoint

MODELS = Path(__file__).parents[1] / "models"
SOURCE = MODELS / "tiny-llava"

# Tile grids as (rows, columns), the five of LLaVA-v1.6.
GRIDS = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]

PIXTRAL_TOKENS = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}

# Factors on a standard deviation of 1/sqrt(inputs). With 1 everywhere, attention is close to
# uniform: a picture's features average out, and many pictures get the same answer.
SCALES = {"q_proj": 2.0, "k_proj": 2.0, "linear_2": 3.0, "lm_head": 3.0}


def source_config() -> Any:
    """The source's configuration, with an output layer of its own.

    Tied to the input embeddings, random weights would repeat the last token of the prompt.
    """
    config = LlavaConfig.from_pretrained(SOURCE)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    return config


def normalisation() -> dict[str, Any]:
    """Mean and standard deviation per colour channel, of values scaled to 0..1."""
    processor = json.loads((SOURCE / "processor_config.json").read_text())["image_processor"]
    return {name: processor[name] for name in ("image_mean", "image_std")}


def next_model() -> tuple[Any, Any]:
    """LLaVA-NeXT: the source's CLIP tower on the whole picture, then on each of its tiles."""
    source = source_config()
    vision = source.vision_config
    side = vision.image_size  # of a tile, in pixels
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    source.text_config.vocab_size = len(tokenizer)
    pinpoints = [[rows * side, columns * side] for rows, columns in GRIDS]
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=source.text_config,
        image_token_index=source.image_token_index,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=source.vision_feature_layer,
        vision_feature_select_strategy=source.vision_feature_select_strategy,
        tie_word_embeddings=False,
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=pinpoints,
            **normalisation(),
        ),
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=source.vision_feature_select_strategy,
        num_additional_image_tokens=1,  # CLIP's class token, which the strategy drops again
        chat_template=tokenizer.chat_template,
    )
    return LlavaNextForConditionalGeneration(config), processor


def pixtral_model() -> tuple[Any, Any]:
    """LLaVA with a Pixtral tower, which sees the whole picture in its own aspect ratio."""
    source = source_config()
    clip = source.vision_config
    tokenizer = AutoTokenizer.from_pretrained(SOURCE, extra_special_tokens=PIXTRAL_TOKENS)
    tokenizer.chat_template = tokenizer.chat_template.replace("<image>", tokenizer.image_token)
    source.text_config.vocab_size = len(tokenizer)
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(
            hidden_size=clip.hidden_size,
            intermediate_size=clip.intermediate_size,
            num_hidden_layers=3,
            num_attention_heads=clip.num_attention_heads,
            image_size=clip.image_size,  # of the longer edge, in pixels
            patch_size=clip.patch_size,
        ),
        text_config=source.text_config,
        image_token_index=tokenizer.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    processor = PixtralProcessor(
        image_processor=PixtralImageProcessorPil(
            size={"longest_edge": clip.image_size},
            patch_size={"height": clip.patch_size, "width": clip.patch_size},
            **normalisation(),
        ),
        tokenizer=tokenizer,
        patch_size=clip.patch_size,
        chat_template=tokenizer.chat_template,
        **PIXTRAL_TOKENS,
    )
    return LlavaForConditionalGeneration(config), processor


def mistral3_model() -> tuple[Any, Any]:
    """Mistral 3: the Pixtral model with a Mistral, and a projector that merges patches."""
    pixtral, processor = pixtral_model()
    source = pixtral.config
    text = source.text_config
    config = Mistral3Config(
        vision_config=source.vision_config,
        text_config=MistralConfig(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            max_position_embeddings=text.max_position_embeddings,
            sliding_window=None,
            bos_token_id=text.bos_token_id,
            eos_token_id=text.eos_token_id,
            pad_token_id=text.pad_token_id,
            tie_word_embeddings=False,
        ),
        image_token_index=source.image_token_index,
        vision_feature_layer=-1,
        spatial_merge_size=1,
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config), processor


def randomise(model: Any, special_ids: list[int], seed: int) -> None:
    """Draw all weights but the norms' and the biases.

    Special tokens get logits of 0, which are never the greatest: no answer ends early, and none
    holds a placeholder.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            layer = name.removesuffix(".weight").rpartition(".")[2]
            if layer in ("embed_tokens", "position_embedding", "class_embedding", "image_newline"):
                weight.normal_(generator=generator)
            elif weight.dim() > 1:  # [outputs, inputs], or [outputs, channels, rows, columns]
                std = SCALES.get(layer, 1.0) * weight[0].numel() ** -0.5
                weight.normal_(std=std, generator=generator)
        model.lm_head.weight[special_ids] = 0


KINDS = {
    "next": ("tiny-llava-next", next_model),
    "pixtral": ("tiny-pixtral", pixtral_model),
    "mistral3": ("tiny-mistral3", mistral3_model),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tiny image models with random weights.")
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--out", type=Path, default=MODELS, metavar="DIR", help="default: models/")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    for name, make in (KINDS[kind] for kind in arguments.kinds):
        model, processor = make()
        randomise(model, list(processor.tokenizer.added_tokens_decoder), arguments.seed)
        checkpoint.save(model, processor, arguments.out / name)


if __name__ == "__main__":
    main()
