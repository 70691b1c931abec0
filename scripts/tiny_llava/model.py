"""The model before training: tokenizer, picture processor, layers and their first values."""

import math
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.init import normal_, zeros_
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from easerve.workload import shapes

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer briefly.")
NO_PICTURE = "there is no picture"
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<image>")
BEGIN, END, PAD, IMAGE = range(4)
VOCABULARY = 448
MAX_POSITIONS = 2048
PATCH = 12
GRID = shapes.SIZE // PATCH  # patches across and down
NUM_PATCHES = GRID * GRID
WIDTH = 128
HEADS, KV_HEADS = 4, 2
TOWER_LAYERS, TOWER_INNER = 4, 384
LANGUAGE_LAYERS, LANGUAGE_INNER = 3, 256
WHITE, SPREAD = 1.0, 0.5  # the background becomes 0


def tokenizer(rng: random.Random) -> Any:
    """Byte-pair encoding: every byte, and the words of questions and answers."""
    texts = [*SYSTEM_TEXTS, NO_PICTURE, "\nSYSTEM: \nUSER: \nASSISTANT: \nTOOL: \nTOOLS: "] * 500
    for _ in range(3000):
        for question in shapes.questions(shapes.draw(rng), rng):
            texts.append(f"\nUSER: {question.text}\nASSISTANT: {question.answer}")
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    begin, end, pad, image = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        extra_special_tokens={"image_token": image},
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(),
    )


def processor(words: Any) -> Any:
    """What turns pictures and text into the model's inputs."""
    size = shapes.SIZE
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": size},
            crop_size={"height": size, "width": size},
            image_mean=[WHITE] * 3,
            image_std=[SPREAD] * 3,
        ),
        tokenizer=words,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=SPECIAL_TOKENS[IMAGE],
        chat_template=words.chat_template,
    )


def build() -> Any:
    """LLaVA with a CLIP tower (its last layer is not used, as in the real one) and a Llama."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=TOWER_INNER,
            num_hidden_layers=TOWER_LAYERS + 1,
            num_attention_heads=HEADS,
            image_size=shapes.SIZE,
            patch_size=PATCH,
            projection_dim=WIDTH,
        ),
        text_config=LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=LANGUAGE_INNER,
            num_hidden_layers=LANGUAGE_LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=WIDTH // HEADS,
            vocab_size=VOCABULARY,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=PAD,
            tie_word_embeddings=True,
        ),
        image_token_index=IMAGE,
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        _first_values(model.model)
    return model


def _first_values(model: Any) -> None:
    """Matrices keep the variance of their input; what is added to a residual is smaller."""
    for name, value in model.named_parameters():
        if name.endswith("patch_embedding.weight"):
            normal_(value, std=2 * value[0].numel() ** -0.5)
        elif name.endswith("position_embedding.weight"):
            zeros_(value)
            value[1:] = 0.7 * _sines()
        elif name.endswith("embed_tokens.weight"):
            normal_(value, std=0.08)
        elif value.dim() == 2:
            adds = name.endswith(
                ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")
            )
            normal_(value, std=value.shape[1] ** -0.5 * (0.4 if adds else 1))


def _sines() -> torch.Tensor:
    """[patch, width]: sines and cosines of a patch's row and column, from 4 patches a wave up."""
    count = WIDTH // 4
    waves = math.pi / 2 * (2 * GRID) ** -(torch.arange(count) / count)
    cells = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
    angles = cells[:, :, None] * waves  # [patch, row or column, wave]
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(1)
