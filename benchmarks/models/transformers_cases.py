"""Architectures of transformers, by small configurations of their own config classes."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from cases import REGISTRY, Batch, Model, numbers, whole, without_chance
from torch import Tensor, nn

VOCABULARY, TOKENS = 64, 12
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
CHANCE = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "dropout_rate",
    "embd_pdrop",
    "attn_pdrop",
    "resid_pdrop",
    "feat_proj_dropout",
    "final_dropout",
    "drop_path_rate",
)


def text(generator: torch.Generator) -> Batch:
    """Two sentences, the second one shorter by a few tokens, as a tokenizer pads them."""
    ids = whole(generator, VOCABULARY - 3, 2, TOKENS) + 3
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    short = int(whole(generator, 4, 1))
    mask[1, TOKENS - short :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def labelled_text(generator: torch.Generator) -> Batch:
    batch = text(generator)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"labels": labels}


def classified_text(generator: torch.Generator) -> Batch:
    return text(generator) | {"labels": whole(generator, 2, 2)}


def translated_text(generator: torch.Generator) -> Batch:
    return text(generator) | {"labels": whole(generator, VOCABULARY - 3, 2, 8) + 3}


def image(size: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        return {
            "pixel_values": numbers(generator, 2, 3, size, size),
            "labels": whole(generator, 2, 2),
        }

    return draw


def own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def build(
    model: str,
    config: str,
    draw: Callable[[torch.Generator], Batch],
    labels: tuple[str, ...] = ("labels",),
    objective: Callable[..., Tensor] = own_loss,
    **values: Any,
) -> Model:
    configured = getattr(transformers, config)(**values)
    for inner in (configured, *vars(configured).values()):
        if isinstance(inner, transformers.PretrainedConfig):
            for name in CHANCE:
                if getattr(inner, name, None):
                    setattr(inner, name, 0.0)
    module: nn.Module = getattr(transformers, model)(configured)
    return Model(
        without_chance(module),
        draw,
        objective,
        labels=labels,
        checkpoint=checkpointing if module.supports_gradient_checkpointing else None,
    )


def checkpointing(module: Any) -> None:
    module.gradient_checkpointing_enable()


def add(name: str, family: str, *args: Any, refused: str = "", **values: Any) -> None:
    REGISTRY.add(name, family, refused=refused)(lambda: build(*args, **values))


CAUSAL = "decoders of text"
for name, model, config, values in (
    ("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED),
    ("mistral", "MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 8}),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    ("qwen3", "Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    ("gemma", "GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}),
    ("gemma2", "Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 8}),
    ("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig",
     GROUPED | {"head_dim": 8, "sliding_window": 8}),
    ("phi3", "Phi3ForCausalLM", "Phi3Config", GROUPED),
    ("olmo2", "Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    ("gpt2", "GPT2LMHeadModel", "GPT2Config",
     {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    ("gptj", "GPTJForCausalLM", "GPTJConfig",
     {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
      "rotary_dim": 4}),
    ("opt", "OPTForCausalLM", "OPTConfig",
     {k: v for k, v in TEXT.items() if k != "intermediate_size"}
     | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("bloom", "BloomForCausalLM", "BloomConfig",
     {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("falcon", "FalconForCausalLM", "FalconConfig",
     {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 4}),
    ("mamba", "MambaForCausalLM", "MambaConfig",
     {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
):  # fmt: skip
    add(name, CAUSAL, model, config, labelled_text, **values)

EXPERTS = "mixtures of experts, as they are by default"
for name, model, config, values in (
    ("mixtral", "MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
     GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 16}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
     TEXT | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
             "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
             "first_k_dense_replace": 1, "n_shared_experts": 1}),
    ("gpt_oss", "GptOssForCausalLM", "GptOssConfig",
     GROUPED | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 8}),
    ("olmoe", "OlmoeForCausalLM", "OlmoeConfig",
     GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
):  # fmt: skip
    add(name, EXPERTS, model, config, labelled_text, **values)

ENCODERS = "encoders of text"
ELECTRA = TEXT | {"embedding_size": 16}
for name, model, config, draw, values in (
    ("bert", "BertForMaskedLM", "BertConfig", labelled_text, TEXT),
    ("roberta", "RobertaForSequenceClassification", "RobertaConfig", classified_text, TEXT),
    ("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", classified_text,
     {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    ("albert", "AlbertForMaskedLM", "AlbertConfig", labelled_text, ELECTRA),
    ("electra", "ElectraForMaskedLM", "ElectraConfig", labelled_text, ELECTRA),
    ("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", labelled_text,
     TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
             "position_biased_input": False}),
    ("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", labelled_text,
     TEXT | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}),
    ("xlm_roberta", "XLMRobertaForTokenClassification", "XLMRobertaConfig",
     lambda g: text(g) | {"labels": whole(g, 2, 2, TOKENS)}, TEXT),
    ("mpnet", "MPNetModel", "MPNetConfig", text, TEXT),
):  # fmt: skip
    chosen = (
        {} if draw is not text else {"objective": lambda o: o.last_hidden_state.square().mean()}
    )
    add(name, ENCODERS, model, config, draw, **chosen, **values)

SEQ2SEQ = "encoders and decoders"
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
      "num_heads": 4, "decoder_start_token_id": 0}  # fmt: skip
for name, model, config, values in (
    ("t5", "T5ForConditionalGeneration", "T5Config", T5),
    ("mt5", "MT5ForConditionalGeneration", "MT5Config", T5),
    ("bart", "BartForConditionalGeneration", "BartConfig", BART),
    ("m2m_100", "M2M100ForConditionalGeneration", "M2M100Config", BART),
):
    add(name, SEQ2SEQ, model, config, translated_text, labels=(), **values)

VISION = "images"
for name, model, config, size, values in (
    ("vit", "ViTForImageClassification", "ViTConfig", 32, IMAGE),
    ("deit", "DeiTForImageClassification", "DeiTConfig", 32, IMAGE),
    ("dinov2", "Dinov2ForImageClassification", "Dinov2Config", 32, IMAGE),
    ("swin", "SwinForImageClassification", "SwinConfig", 32,
     {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
      "window_size": 4}),
    ("convnext", "ConvNextForImageClassification", "ConvNextConfig", 32,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    ("resnet", "ResNetForImageClassification", "ResNetConfig", 32,
     {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
):  # fmt: skip
    add(f"hf_{name}", VISION, model, config, image(size), **values)


def segmented(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": numbers(generator, 2, 3, 32, 32),
        "labels": whole(generator, 2, 2, 32, 32),
    }


add(
    "segformer", VISION, "SegformerForSemanticSegmentation", "SegformerConfig", segmented,
    hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=16,
)  # fmt: skip


def pairs(generator: torch.Generator) -> Batch:
    return text(generator) | {
        "pixel_values": numbers(generator, 2, 3, 32, 32),
        "return_loss": True,
    }


add(
    "clip", "images and text", "CLIPModel", "CLIPConfig", pairs, ("return_loss",),
    text_config=TEXT, vision_config=IMAGE, projection_dim=16,
)  # fmt: skip


AUDIO = "audio"
SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
}


def spoken(generator: torch.Generator) -> Batch:
    return {"input_values": numbers(generator, 2, 1200), "labels": whole(generator, 2, 2)}


for name, stem in (("wav2vec2", "Wav2Vec2"), ("hubert", "Hubert")):
    model = f"{stem}ForSequenceClassification"
    add(name, AUDIO, model, f"{stem}Config", spoken, **SPEECH)


def heard(generator: torch.Generator) -> Batch:
    return {
        "input_features": numbers(generator, 2, 16, 40),
        "labels": whole(generator, VOCABULARY, 2, 8),
    }


add(
    "whisper", AUDIO, "WhisperForConditionalGeneration", "WhisperConfig", heard, (),
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    num_mel_bins=16, max_source_positions=20, max_target_positions=20,
)  # fmt: skip
REGISTRY.add("encodec", AUDIO)(
    lambda: build(
        "EncodecModel",
        "EncodecConfig",
        lambda g: {"input_values": numbers(g, 2, 1, 320)},
        (),
        lambda output: output.audio_values.square().mean(),
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=16,
    )
)
