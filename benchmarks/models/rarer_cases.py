"""Rarer architectures of transformers, by small configurations of their own config classes."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from cases import Batch, numbers, whole
from torch import Tensor
from transformers_cases import (
    BART,
    CAUSAL,
    ELECTRA,
    GROUPED,
    IMAGE,
    SEQ2SEQ,
    SPEECH,
    T5,
    TEXT,
    TOKENS,
    VISION,
    VOCABULARY,
    add,
    image,
    labelled_text,
    spoken,
    text,
    translated_text,
)

MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
          "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
GEMMA = GROUPED | {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 8, "laurel_rank": 4,
                   "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
                   "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                   "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
for name, model, config, values in (
    ("gemma3n", "Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA),
    ("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", GROUPED | LINEAR),
    ("llama4", "Llama4ForCausalLM", "Llama4TextConfig",
     GROUPED | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4,
                "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0]}),
    ("mamba2", "Mamba2ForCausalLM", "Mamba2Config",
     MAMBA | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4}),
    ("falcon_mamba", "FalconMambaForCausalLM", "FalconMambaConfig", MAMBA | {"state_size": 4}),
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
     TEXT | {"lru_width": 32, "attention_window_size": 8, "num_key_value_heads": 1,
             "block_types": ["recurrent", "attention"]}),
    ("jamba", "JambaForCausalLM", "JambaConfig",
     GROUPED | {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
                "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
                "expert_layer_period": 2, "expert_layer_offset": 1}),
    ("granite_hybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
     GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 4,
                "mamba_d_head": 8, "mamba_chunk_size": 4}),
    ("lfm2", "Lfm2ForCausalLM", "Lfm2Config",
     GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    ("ctrl", "CTRLLMHeadModel", "CTRLConfig",
     {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "dff": 48, "n_layer": 2,
      "n_head": 4}),
    ("xlnet", "XLNetLMHeadModel", "XLNetConfig",
     {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    ("mpt", "MptForCausalLM", "MptConfig",
     {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    ("cohere2", "Cohere2ForCausalLM", "Cohere2Config", GROUPED | {"sliding_window": 8}),
    ("diffllama", "DiffLlamaForCausalLM", "DiffLlamaConfig", GROUPED),
    ("doge", "DogeForCausalLM", "DogeConfig", GROUPED),
    ("stablelm", "StableLmForCausalLM", "StableLmConfig", GROUPED | {"use_qkv_bias": True}),
    ("biogpt", "BioGptForCausalLM", "BioGptConfig", TEXT),
    ("olmo_hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig",
     GROUPED | {"layer_types": ["linear_attention", "full_attention"]}),
):  # fmt: skip
    add(name, CAUSAL, model, config, labelled_text, **values)

add("dbrx", CAUSAL, "DbrxForCausalLM", "DbrxConfig", labelled_text, vocab_size=VOCABULARY,
    d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
    ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    refused="a loop over the experts that have tokens")  # fmt: skip
add("jetmoe", CAUSAL, "JetMoeForCausalLM", "JetMoeConfig", labelled_text, **GROUPED, kv_channels=8,
    num_local_experts=4, num_experts_per_tok=2, refused="experts' shares set shapes")  # fmt: skip
add("reformer", CAUSAL, "ReformerModelWithLMHead", "ReformerConfig", labelled_text,
    vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=2, is_decoder=True,
    attention_head_size=16, attn_layers=["local", "local"], feed_forward_size=48,
    axial_pos_shape=[2, 6], axial_pos_embds_dim=[16, 16], local_attn_chunk_length=4,
    max_position_embeddings=12, refused="its reversible layers set torch's seed")  # fmt: skip
add("rwkv", CAUSAL, "RwkvForCausalLM", "RwkvConfig", labelled_text, **MAMBA, context_length=32,
    attention_hidden_size=32, intermediate_size=48,
    refused="its first inference divides its weights, and says so in an attribute")  # fmt: skip

for name, model, config, values in (
    ("fnet", "FNetForMaskedLM", "FNetConfig", TEXT),
    ("convbert", "ConvBertForMaskedLM", "ConvBertConfig", ELECTRA | {"conv_kernel_size": 3}),
    ("funnel", "FunnelForMaskedLM", "FunnelConfig",
     {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48,
      "block_sizes": [1, 1], "num_decoder_layers": 1}),
    ("big_bird", "BigBirdForMaskedLM", "BigBirdConfig", TEXT | {"attention_type": "original_full"}),
    ("mobilebert", "MobileBertForMaskedLM", "MobileBertConfig",
     TEXT | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}),
    ("squeezebert", "SqueezeBertForMaskedLM", "SqueezeBertConfig",
     TEXT | {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2,
             "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2}),
    ("roformer", "RoFormerForMaskedLM", "RoFormerConfig", TEXT),
    ("esm", "EsmForMaskedLM", "EsmConfig",
     TEXT | {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": True}),
    ("deberta", "DebertaForMaskedLM", "DebertaConfig",
     TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
):  # fmt: skip
    add(name, "encoders of text", model, config, labelled_text, **values)


for name, stem, values, refused in (
    ("longformer", "Longformer", TEXT | {"attention_window": 4}, "an if on the mask"),
    ("ibert", "IBert", TEXT | {"quant_mode": True}, "an if on weights, of which the larger scales"),
    ("xmod", "Xmod", TEXT | {"languages": ["en"], "default_language": "en"},
     "a boolean mask finds a language's sentences"),
):  # fmt: skip
    add(name, "encoders of text", f"{stem}ForMaskedLM", f"{stem}Config", labelled_text,
        **values, refused=refused)  # fmt: skip
add("flaubert", "encoders of text", "FlaubertWithLMHeadModel", "FlaubertConfig", labelled_text,
    vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=64,
    pad_index=0, refused="an assert on the lengths")  # fmt: skip


def last_squares(output: Any) -> Tensor:
    loss: Tensor = output.last_hidden_state.square().mean()
    return loss


add("canine", "encoders of text", "CanineModel", "CanineConfig", text, (), last_squares,
    **TEXT, num_hash_buckets=32, num_hash_functions=2, local_transformer_stride=4,
    downsampling_rate=4)  # fmt: skip
for name, landmarks, refused in (
    ("nystromformer", 16, ""),
    ("nystromformer_landmarks", 4, "its mask has another shape where not all of it is known"),
):
    add(name, "encoders of text", "NystromformerForMaskedLM", "NystromformerConfig",
        lambda g: {"input_ids": whole(g, VOCABULARY, 2, 16), "labels": whole(g, VOCABULARY, 2, 16)},
        **TEXT, num_landmarks=landmarks, segment_means_seq_len=16, refused=refused)  # fmt: skip
add("perceiver_text", "encoders of text", "PerceiverForMaskedLM", "PerceiverConfig",
    lambda g: {"inputs": whole(g, VOCABULARY, 2, TOKENS),
               "labels": whole(g, VOCABULARY, 2, TOKENS)},
    vocab_size=VOCABULARY, num_latents=4, d_latents=16, d_model=16, num_blocks=1,
    num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
    qk_channels=16, v_channels=16, max_position_embeddings=TOKENS)  # fmt: skip

for name, model, config, values in (
    ("longt5", "LongT5ForConditionalGeneration", "LongT5Config",
     T5 | {"encoder_attention_type": "transient-global", "local_radius": 3,
           "global_block_size": 4}),
    ("umt5", "UMT5ForConditionalGeneration", "UMT5Config", T5),
    ("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART),
    ("marian", "MarianMTModel", "MarianConfig", BART),
):  # fmt: skip
    add(name, SEQ2SEQ, model, config, translated_text, labels=(), **values)

PROPHET = {"vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 48,
           "num_encoder_layers": 2, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48,
           "num_decoder_layers": 2, "num_decoder_attention_heads": 4,
           "max_position_embeddings": 64, "ngram": 2}  # fmt: skip


def logits_squares(output: Any) -> Tensor:
    loss: Tensor = output.logits.square().mean()
    return loss


add("prophetnet", SEQ2SEQ, "ProphetNetForConditionalGeneration", "ProphetNetConfig",
    lambda g: text(g) | {"decoder_input_ids": whole(g, VOCABULARY - 3, 2, 8) + 3}, (),
    logits_squares, **PROPHET)  # fmt: skip
add("prophetnet_labels", SEQ2SEQ, "ProphetNetForConditionalGeneration", "ProphetNetConfig",
    translated_text, (), **PROPHET, refused="an assert on the labels")  # fmt: skip
add("switch_transformers", SEQ2SEQ, "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig", translated_text, (), **T5, num_experts=4, expert_capacity=8,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, router_jitter_noise=0.0,
    refused="a loop over the experts that have tokens")  # fmt: skip
add("led", SEQ2SEQ, "LEDForConditionalGeneration", "LEDConfig", translated_text, labels=(),
    refused="an if on the mask", attention_window=4, max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64,
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"})  # fmt: skip

for name, model, config, size, values in (
    ("swinv2", "Swinv2ForImageClassification", "Swinv2Config", 32,
     {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
      "window_size": 4}),
    ("beit", "BeitForImageClassification", "BeitConfig", 32,
     IMAGE | {"use_relative_position_bias": True, "vocab_size": 32}),
    ("focalnet", "FocalNetForImageClassification", "FocalNetConfig", 32,
     {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2],
      "focal_windows": [3, 3], "hidden_sizes": [16, 32]}),
    ("hiera", "HieraForImageClassification", "HieraConfig", 64,
     {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 4],
      "query_stride": [2, 2], "masked_unit_size": [4, 4], "num_query_pool": 2,
      "masked_unit_attention": [True, True, False]}),
    ("mobilevit", "MobileViTForImageClassification", "MobileViTConfig", 64,
     {"image_size": 64, "hidden_sizes": [16, 20, 24],
      "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
      "num_attention_heads": 2}),
    ("pvt_v2", "PvtV2ForImageClassification", "PvtV2Config", 64,
     {"image_size": 64, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
      "num_attention_heads": [1, 1, 2, 2]}),
    ("efficientnet", "EfficientNetForImageClassification", "EfficientNetConfig", 64,
     {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320,
      "depth_divisor": 4, "drop_connect_rate": 0.0}),
    ("regnet", "RegNetForImageClassification", "RegNetConfig", 64,
     {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
      "groups_width": 4}),
    ("swiftformer", "SwiftFormerForImageClassification", "SwiftFormerConfig", 64,
     {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 16], "drop_path_rate": 0.0,
      "drop_mlp_rate": 0.0, "drop_conv_encoder_rate": 0.0}),
):  # fmt: skip
    add(f"hf_{name}", VISION, model, config, image(size), **values)


def pixels(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {"pixel_values": numbers(generator, *shape)}


RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
          "layer_type": "basic"}  # fmt: skip
QUERIES = {"num_queries": 5, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
           "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2}  # fmt: skip
WIDER = {
    "dab_detr": (["stage4"], {"hidden_size": 16}),
    "deformable_detr": (["stage2", "stage3", "stage4"], {"d_model": 32, "decoder_layers": 2}),
}
DETECTION = "detection and segmentation"


def detected(output: Any) -> Tensor:
    loss: Tensor = output.logits.square().mean() + output.pred_boxes.square().mean()
    return loss


for name, model, config in (
    ("detr", "DetrForObjectDetection", "DetrConfig"),
    ("conditional_detr", "ConditionalDetrForObjectDetection", "ConditionalDetrConfig"),
    ("deformable_detr", "DeformableDetrForObjectDetection", "DeformableDetrConfig"),
    ("dab_detr", "DabDetrForObjectDetection", "DabDetrConfig"),
):
    stages, width = WIDER.get(name, (["stage4"], {}))
    backbone = transformers.ResNetConfig(**RESNET, out_features=stages)
    add(name, DETECTION, model, config, pixels(2, 3, 64, 64), (), detected,
        backbone_config=backbone, **QUERIES | width)  # fmt: skip
add("yolos", DETECTION, "YolosForObjectDetection", "YolosConfig", pixels(1, 3, 32, 32), (),
    detected, **IMAGE | {"image_size": [32, 32]}, num_detection_tokens=4)  # fmt: skip
add("dpt", DETECTION, "DPTForSemanticSegmentation", "DPTConfig", pixels(1, 3, 32, 32), (),
    logits_squares, **IMAGE | {"num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, use_auxiliary_head=False,
    initializer_range=0.2)  # fmt: skip
add("sam_vision", DETECTION, "SamVisionModel", "SamVisionConfig", pixels(1, 3, 32, 32), (),
    last_squares, hidden_size=16, output_channels=8, num_hidden_layers=2, num_attention_heads=2,
    image_size=32, patch_size=4, window_size=4, global_attn_indexes=[1], num_pos_feats=4,
    mlp_dim=16)  # fmt: skip
VIDEO = "video and series"
add("videomae", VIDEO, "VideoMAEForVideoClassification", "VideoMAEConfig", pixels(1, 4, 3, 32, 32),
    (), logits_squares, **IMAGE, num_frames=4)  # fmt: skip
add("timesformer", VIDEO, "TimesformerForVideoClassification", "TimesformerConfig",
    pixels(1, 4, 3, 32, 32), (), logits_squares, **IMAGE, num_frames=4)  # fmt: skip


def series(generator: torch.Generator) -> Batch:
    return {
        "past_values": numbers(generator, 2, 24, 3),
        "future_values": numbers(generator, 2, 6, 3),
    }


PATCHES = {"num_input_channels": 3, "context_length": 24, "patch_length": 6, "patch_stride": 3,
           "d_model": 16, "prediction_length": 6}  # fmt: skip
for name, scaling in (("patchtst", "std"), ("patchtst_mean", "mean")):
    add(name, VIDEO, "PatchTSTForPrediction", "PatchTSTConfig", series, (), num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=24, path_dropout=0.0, scaling=scaling,
        head_dropout=0.0, positional_dropout=0.0, ff_dropout=0.0, attention_dropout=0.0,
        **PATCHES)  # fmt: skip
add("patchtst_distribution", VIDEO, "PatchTSTForPrediction", "PatchTSTConfig", series, (),
    num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, loss="nll",
    distribution_output="student_t", head_dropout=0.0, **PATCHES)  # fmt: skip
add("patchtsmixer", VIDEO, "PatchTSMixerForPrediction", "PatchTSMixerConfig", series, (),
    num_layers=2, head_dropout=0.0, **PATCHES)  # fmt: skip


def timed(length: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        return {
            "past_values": numbers(generator, 2, length),
            "past_time_features": numbers(generator, 2, length, 2),
            "past_observed_mask": torch.ones(2, length),
            "future_values": numbers(generator, 2, 6),
            "future_time_features": numbers(generator, 2, 6, 2),
        }

    return draw


SERIES = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2], "d_model": 16,
          "num_time_features": 2, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
          "decoder_ffn_dim": 16}  # fmt: skip
for name, model in (
    ("time_series_transformer", "TimeSeriesTransformer"),
    ("informer", "Informer"),
):
    add(name, VIDEO, f"{model}ForPrediction", f"{model}Config", timed(14), (), **SERIES)
add("autoformer", VIDEO, "AutoformerForPrediction", "AutoformerConfig", timed(14), (), **SERIES,
    refused="in training it takes the delays at places that are data")  # fmt: skip

PAIRS = "images and text"
LANGUAGE = TEXT | {"num_key_value_heads": 2}


def pictured(generator: torch.Generator) -> Batch:
    """Sentences that begin with the four places of a picture's patches."""
    ids = torch.cat([torch.full((2, 4), 5), whole(generator, VOCABULARY - 6, 2, 8) + 6], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids,
            "pixel_values": numbers(generator, 2, 3, 16, 16)}  # fmt: skip


add("llava", PAIRS, "LlavaForConditionalGeneration", "LlavaConfig", pictured, (),
    text_config={"model_type": "llama"} | LANGUAGE,
    vision_config={"model_type": "clip_vision_model"} | IMAGE | {"image_size": 16},
    image_token_index=5, image_token_id=5)  # fmt: skip
add("siglip", PAIRS, "SiglipModel", "SiglipConfig",
    lambda g: {"input_ids": whole(g, VOCABULARY, 2, TOKENS), "return_loss": True,
               "pixel_values": numbers(g, 2, 3, 32, 32)},
    ("return_loss",), text_config=TEXT, vision_config=IMAGE)  # fmt: skip
add("vilt", PAIRS, "ViltModel", "ViltConfig",
    lambda g: text(g) | {"pixel_values": numbers(g, 2, 3, 32, 32)}, (), last_squares,
    **TEXT | IMAGE, max_image_length=-1, refused="it selects the valid patches")  # fmt: skip
add("lxmert", PAIRS, "LxmertModel", "LxmertConfig",
    lambda g: text(g) | {"visual_feats": numbers(g, 2, 3, 8), "visual_pos": numbers(g, 2, 3, 4)},
    (), lambda o: o.language_output.square().mean() + o.vision_output.square().mean(),
    vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, intermediate_size=48, l_layers=1,
    x_layers=1, r_layers=1, visual_feat_dim=8)  # fmt: skip

AUDIO = "audio"
for name, stem, values in (
    ("wavlm", "WavLM", {}),
    ("unispeech", "UniSpeech", {}),
    ("sew", "SEW", {"squeeze_factor": 2}),
    ("data2vec_audio", "Data2VecAudio", {}),
    ("wav2vec2_conformer", "Wav2Vec2Conformer", {"conv_depthwise_kernel_size": 3}),
):
    add(
        name, AUDIO, f"{stem}ForSequenceClassification", f"{stem}Config", spoken, **SPEECH, **values
    )
add("ast", AUDIO, "ASTForAudioClassification", "ASTConfig",
    lambda g: {"input_values": numbers(g, 2, 24, 16)}, (), logits_squares, **TEXT, patch_size=8,
    frequency_stride=8, time_stride=8, max_length=24, num_mel_bins=16)  # fmt: skip
add("univnet", AUDIO, "UnivNetModel", "UnivNetConfig",
    lambda g: {"input_features": numbers(g, 1, 8, 6), "noise_sequence": numbers(g, 1, 8, 4)}, (),
    lambda o: o.waveforms.square().mean(), model_in_channels=4, model_hidden_channels=4,
    num_mel_bins=6, kernel_predictor_hidden_channels=4, kernel_predictor_num_blocks=1)  # fmt: skip
add("speecht5_vocoder", AUDIO, "SpeechT5HifiGan", "SpeechT5HifiGanConfig",
    lambda g: {"spectrogram": numbers(g, 1, 8, 6)}, (), lambda o: o.square().mean(),
    model_in_dim=6, upsample_initial_channel=16, upsample_rates=[2, 2], initializer_range=0.3,
    upsample_kernel_sizes=[4, 4],
    resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], normalize_before=True)  # fmt: skip
add("dac", AUDIO, "DacModel", "DacConfig", lambda g: {"input_values": numbers(g, 1, 1, 64)}, (),
    lambda o: o.audio_values.square().mean() + o.loss.mean(), encoder_hidden_size=4,
    downsampling_ratios=[2, 2], decoder_hidden_size=16, n_codebooks=2, codebook_size=8,
    codebook_dim=4, quantizer_dropout=0.0)  # fmt: skip


def spoken_text(generator: torch.Generator) -> Batch:
    durations = whole(generator, 3, 1, 6) + 1
    frames = int(durations.sum())
    return {
        "input_ids": whole(generator, VOCABULARY - 1, 1, 6) + 1,
        "duration_labels": durations,
        "spectrogram_labels": numbers(generator, 1, frames, 6),
        "pitch_labels": numbers(generator, 1, 6, 1),
        "energy_labels": numbers(generator, 1, 6, 1),
    }


add("fastspeech2", AUDIO, "FastSpeech2ConformerModel", "FastSpeech2ConformerConfig", spoken_text,
    refused="durations are data: they set shapes", vocab_size=VOCABULARY, hidden_size=16,
    num_mel_bins=6, encoder_layers=1, decoder_layers=1, encoder_linear_units=16,
    decoder_linear_units=16, speech_decoder_postnet_units=8, duration_predictor_channels=8,
    energy_predictor_channels=8, pitch_predictor_channels=8)  # fmt: skip
