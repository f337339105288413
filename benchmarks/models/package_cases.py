"""Networks of packages that nobody here wrote, as small as their arguments allow."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from cases import REGISTRY, Batch, Model, numbers, whole, without_chance
from other_cases import entropy, squares
from torch import Tensor, nn

Draw = Callable[[torch.Generator], Batch]
VOCABULARY, TOKENS = 32, 16


def made(path: str, *args: Any, **options: Any) -> nn.Module:
    """The network that `package.module:Name` builds."""
    module, _, name = path.partition(":")
    network: nn.Module = getattr(import_module(module), name)(*args, **options)
    return without_chance(network)


def all_squares(output: Any) -> Tensor:
    """A loss of whatever a network returns."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if differentiable(leaf)]
    return sum((t.abs().square().mean() for t in tensors), torch.zeros(()))


def differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def add(
    name: str, family: str, path: str, draw: Draw, *args: Any, expected: Any = None, **options: Any
) -> None:
    """A network whose outputs are squared for a loss."""
    REGISTRY.add(name, family, packages=True, **(expected or {}))(
        lambda: Model(made(path, *args, **options), draw, all_squares)
    )


def tokens(generator: torch.Generator) -> Batch:
    return {"0": whole(generator, VOCABULARY, 2, TOKENS)}


def floats(*shape: int) -> Draw:
    return lambda generator: {"0": numbers(generator, *shape)}


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return entropy(output.flatten(0, 1), target.flatten())


def token_targets(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (whole(generator, VOCABULARY, 2, TOKENS),)


def add_language_model(
    name: str, family: str, build: Callable[[], nn.Module], **expected: Any
) -> None:
    REGISTRY.add(name, family, packages=True, **expected)(
        lambda: Model(without_chance(build()), tokens, next_token, token_targets)
    )


LANGUAGE = "attention of other packages"
SMALL = {"dim": 32, "depth": 2, "heads": 2}


def x_transformer(kind: str, **options: Any) -> nn.Module:
    layers = made(f"x_transformers:{kind}", **SMALL, attn_dim_head=16, **options)
    return made(
        "x_transformers:TransformerWrapper",
        num_tokens=VOCABULARY,
        max_seq_len=TOKENS,
        num_memory_tokens=2 if "macaron" in options else 0,
        attn_layers=layers,
    )


for name, kind, options in (
    ("rotary", "Decoder", {"rotary_pos_emb": True, "attn_flash": True, "use_rmsnorm": True}),
    ("t5_bias", "Decoder", {"rel_pos_bias": True, "attn_qk_norm": True, "attn_kv_heads": 1}),
    ("macaron", "Decoder", {"macaron": True, "attn_pre_talking_heads": True, "shift_tokens": 1}),
    (
        "residual_attn",
        "Encoder",
        {"residual_attn": True, "gate_residual": True, "sandwich_norm": True},
    ),
    ("sparse_topk", "Decoder", {"attn_sparse_topk": 4, "attn_gate_values": True}),
    ("hyper", "Decoder", {"num_residual_streams": 2}),
):
    add_language_model(
        f"xt_{name}", LANGUAGE, lambda kind=kind, options=options: x_transformer(kind, **options)
    )


def run_once(module: nn.Module, *inputs: Tensor) -> nn.Module:
    """The module with the buffers that its first step makes."""
    module(*inputs)
    return module


def alibi() -> nn.Module:
    return x_transformer("Encoder", alibi_pos_bias=True, ff_glu=True, use_scalenorm=True)


add_language_model(
    "xt_alibi", LANGUAGE, lambda: run_once(alibi(), torch.zeros(1, TOKENS, dtype=torch.long))
)
add_language_model("xt_alibi_fresh", LANGUAGE, alibi, refused="its first step registers a buffer")


@REGISTRY.add("xt_autoregressive", LANGUAGE, packages=True)
def xt_autoregressive() -> Model:
    module = made("x_transformers:AutoregressiveWrapper", x_transformer("Decoder"))
    return Model(module, lambda g: {"0": whole(g, VOCABULARY, 2, TOKENS)})


@REGISTRY.add("xt_encoder_decoder", LANGUAGE, packages=True)
def xt_encoder_decoder() -> Model:
    sides = {
        f"{side}_{key}": value
        for side in ("enc", "dec")
        for key, value in {
            "num_tokens": VOCABULARY, "max_seq_len": TOKENS, "depth": 1, "heads": 2,
        }.items()
    }  # fmt: skip
    module = made("x_transformers:XTransformer", dim=32, **sides)
    return Model(
        module, lambda g: {"0": whole(g, VOCABULARY, 2, TOKENS), "1": whole(g, VOCABULARY, 2, 9)}
    )


@REGISTRY.add("xt_continuous", LANGUAGE, packages=True)
def xt_continuous() -> Model:
    layers = made("x_transformers:Encoder", **SMALL, attn_dim_head=16, dynamic_pos_bias=True)
    module = made(
        "x_transformers:ContinuousTransformerWrapper",
        dim_in=6, dim_out=5, max_seq_len=TOKENS, attn_layers=layers,
    )  # fmt: skip
    return Model(module, floats(2, TOKENS, 6), squares)


LM = {"num_tokens": VOCABULARY, "max_seq_len": TOKENS} | SMALL
for name, path, options in (
    ("performer", "performer_pytorch:PerformerLM",
     LM | {"dim_head": 16, "causal": True, "auto_check_redraw": False}),
    ("reformer_full", "reformer_pytorch:ReformerLM",
     LM | {"dim_head": 16, "causal": True, "full_attn_thres": 64, "ff_chunks": 2}),
    ("linformer", "linformer:LinformerLM",
     SMALL | {"num_tokens": VOCABULARY, "seq_len": TOKENS, "k": 8}),
    ("linformer_reversible", "linformer:LinformerLM",
     SMALL | {"num_tokens": VOCABULARY, "seq_len": TOKENS, "k": 8, "reversible": True}),
    ("linear_attention", "linear_attention_transformer:LinearAttentionTransformerLM",
     LM | {"causal": True, "n_local_attn_heads": 1, "local_attn_window_size": 8}),
    ("sinkhorn", "sinkhorn_transformer:SinkhornTransformerLM",
     LM | {"bucket_size": 4, "n_sortcut": 1}),
):  # fmt: skip
    add_language_model(name, LANGUAGE, lambda path=path, options=options: made(path, **options))
add_language_model("performer_redrawn", LANGUAGE,
    lambda: made("performer_pytorch:PerformerLM", **LM, dim_head=16),
    refused="an if on a buffer that counts the steps")  # fmt: skip
add("gmlp", LANGUAGE, "g_mlp_pytorch:gMLP", tokens, num_tokens=VOCABULARY, dim=32, depth=2,
    seq_len=TOKENS)  # fmt: skip
add("perceiver", LANGUAGE, "perceiver_pytorch:Perceiver", floats(2, 6, 6, 3), num_freq_bands=2,
    depth=2, max_freq=4.0, num_latents=4, latent_dim=16, latent_heads=2, cross_dim_head=8,
    latent_dim_head=8, num_classes=5, weight_tie_layers=True)  # fmt: skip
add("perceiver_io", LANGUAGE, "perceiver_pytorch:PerceiverIO",
    lambda g: {"0": numbers(g, 2, 10, 12), "queries": numbers(g, 7, 16)}, depth=2, dim=12,
    queries_dim=16, logits_dim=5, num_latents=4, latent_dim=16, latent_heads=2, cross_dim_head=8,
    latent_dim_head=8)  # fmt: skip


@REGISTRY.add("enformer", LANGUAGE, packages=True, refused="it asks for a tensor's exact class")
def enformer() -> Model:
    module = import_module("enformer_pytorch").Enformer.from_hparams(
        dim=48, depth=1, heads=2, output_heads={"human": 5, "mouse": 3}, target_length=2,
        dim_divisible_by=4, num_downsamples=3,
    )  # fmt: skip
    return Model(without_chance(module), lambda g: {"0": whole(g, 5, 1, 64)}, all_squares)


VIT = "vit-pytorch"
IMAGES = floats(2, 3, 32, 32)
PATCHED = {"image_size": 32, "patch_size": 8, "num_classes": 5, "mlp_dim": 48} | SMALL
for name, path, options in (
    ("vit", "vit_pytorch:ViT", PATCHED),
    ("simple", "vit_pytorch:SimpleViT", PATCHED),
    ("deep", "vit_pytorch.deepvit:DeepViT", PATCHED),
    ("cait", "vit_pytorch.cait:CaiT", PATCHED | {"cls_depth": 1, "layer_dropout": 0.0}),
    ("cct", "vit_pytorch.cct:CCT",
     {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 7, "stride": 2,
      "padding": 3, "pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1,
      "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 5,
      "dropout_rate": 0.0, "attention_dropout": 0.0, "stochastic_depth_rate": 0.0}),
    ("cross", "vit_pytorch.cross_vit:CrossViT",
     {"image_size": 32, "num_classes": 5, "sm_dim": 16, "lg_dim": 24, "sm_patch_size": 8,
      "lg_patch_size": 16, "sm_enc_depth": 1, "lg_enc_depth": 1, "sm_enc_heads": 2,
      "lg_enc_heads": 2, "depth": 2, "cross_attn_heads": 2, "cross_attn_depth": 1,
      "sm_enc_mlp_dim": 16, "lg_enc_mlp_dim": 16}),
    ("pit", "vit_pytorch.pit:PiT",
     {"image_size": 32, "patch_size": 4, "dim": 32, "num_classes": 5, "depth": (1, 1), "heads": 2,
      "mlp_dim": 48}),
    ("cvt", "vit_pytorch.cvt:CvT",
     {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 16, "s2_heads": 2,
      "s3_heads": 2, "s3_depth": 1, "s2_depth": 1}),
    ("twins", "vit_pytorch.twins_svt:TwinsSVT",
     {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 16, "s4_emb_dim": 16,
      "s1_patch_size": 4, "s1_local_patch_size": 4, "s1_global_k": 4, "s2_patch_size": 2,
      "s2_local_patch_size": 2, "s2_global_k": 2, "s3_patch_size": 2, "s3_local_patch_size": 1,
      "s3_global_k": 1, "s4_patch_size": 1, "s4_local_patch_size": 1, "s4_global_k": 1,
      "s3_depth": 1, "s4_depth": 1}),
    ("mobile", "vit_pytorch.mobile_vit:MobileViT",
     {"image_size": (32, 32), "dims": [16, 16, 16], "channels": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16],
      "num_classes": 5, "patch_size": (1, 1)}),
    ("xcit", "vit_pytorch.xcit:XCiT", PATCHED | {"cls_depth": 1}),
    ("max", "vit_pytorch.max_vit:MaxViT",
     {"num_classes": 5, "dim_conv_stem": 8, "dim": 16, "dim_head": 8, "depth": (1, 1),
      "window_size": 4}),
    ("parallel", "vit_pytorch.parallel_vit:ViT", PATCHED),
    ("registers", "vit_pytorch.simple_vit_with_register_tokens:SimpleViT", PATCHED),
    ("nest", "vit_pytorch.nest:NesT",
     {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
      "block_repeats": (1, 1), "num_classes": 5}),
    ("crossformer", "vit_pytorch.crossformer:CrossFormer",
     {"num_classes": 5, "dim": (64, 64, 64, 64), "depth": (1, 1, 1, 1),
      "global_window_size": (4, 2, 1, 1), "local_window_size": 1}),
    ("regionvit", "vit_pytorch.regionvit:RegionViT",
     {"dim": (16, 16, 16, 16), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 5,
      "tokenize_local_3_conv": False, "use_peg": False}),
    ("scalable", "vit_pytorch.scalable_vit:ScalableViT",
     {"num_classes": 5, "dim": 8, "heads": (2, 2), "depth": (1, 1), "ssa_dim_key": (8, 8),
      "reduction_factor": (2, 1), "window_size": (4, None)}),
):  # fmt: skip
    add(f"vitp_{name}", VIT, path, IMAGES, **options)
add("vitp_vivit", VIT, "vit_pytorch.vivit:ViViT", floats(1, 3, 4, 32, 32), image_size=32, frames=4,
    image_patch_size=16, frame_patch_size=2, num_classes=5, dim=32, spatial_depth=1,
    temporal_depth=1, heads=2, mlp_dim=32)  # fmt: skip


GENERATION = "diffusion and segmentation of other packages"
add("ddp_unet", GENERATION, "denoising_diffusion_pytorch:Unet",
    lambda g: {"0": numbers(g, 2, 3, 16, 16), "1": whole(g, 1000, 2)}, 8, dim_mults=(1, 2),
    attn_dim_head=8, attn_heads=2)  # fmt: skip
add("ddp_unet_flash", GENERATION, "denoising_diffusion_pytorch:Unet",
    lambda g: {"0": numbers(g, 2, 3, 16, 16), "1": whole(g, 1000, 2)}, 8, dim_mults=(1, 2),
    attn_dim_head=8, attn_heads=2, flash_attn=True, learned_sinusoidal_cond=True)  # fmt: skip
add("ddp_unet1d", GENERATION, "denoising_diffusion_pytorch:Unet1D",
    lambda g: {"0": numbers(g, 2, 3, 32), "1": whole(g, 1000, 2)}, 8, dim_mults=(1, 2),
    attn_dim_head=8, attn_heads=2)  # fmt: skip
add("ddp_karras_unet", GENERATION, "denoising_diffusion_pytorch.karras_unet:KarrasUnet",
    lambda g: {"0": numbers(g, 2, 4, 16, 16), "1": whole(g, 1000, 2).float(),
               "class_labels": whole(g, 5, 2)},
    image_size=16, dim=8, dim_max=16, num_classes=5, channels=4, num_downsamples=1,
    num_blocks_per_stage=1, attn_res=(8,), attn_dim_head=8, fourier_dim=8,
    expected={"refused": "it writes over the weights that it trains"})  # fmt: skip
SEGMENTED = {"encoder_weights": None, "classes": 3}
for name in ("Unet", "FPN", "DeepLabV3Plus", "PSPNet", "MAnet", "UPerNet", "Segformer"):
    add(f"smp_{name.lower()}", GENERATION, f"segmentation_models_pytorch:{name}",
        floats(2, 3, 64, 64), encoder_name="tu-mobilenetv3_small_050", **SEGMENTED)  # fmt: skip
add("smp_unet_resnet", GENERATION, "segmentation_models_pytorch:Unet", floats(2, 3, 64, 64),
    encoder_name="resnet18", decoder_attention_type="scse", **SEGMENTED)  # fmt: skip

MEDICAL = "monai"
NETS = "monai.networks.nets"
PLANE = floats(2, 1, 32, 32)
VOLUME = floats(1, 1, 32, 32, 32)
for name, kind, draw, options in (
    ("unet", "UNet", PLANE,
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 16),
      "strides": (2, 2), "num_res_units": 1}),
    ("basic_unet", "BasicUNet", PLANE,
     {"spatial_dims": 2, "features": (8, 8, 8, 8, 8, 8)}),
    ("segresnet", "SegResNet", PLANE,
     {"spatial_dims": 2, "blocks_down": (1, 1), "blocks_up": (1,)}),
    ("unetr", "UNETR", VOLUME,
     {"in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 4, "hidden_size": 24,
      "mlp_dim": 24, "num_heads": 2}),
    ("swin_unetr", "SwinUNETR", floats(1, 1, 64, 64),
     {"in_channels": 1, "out_channels": 2, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2),
      "window_size": 4, "feature_size": 12, "spatial_dims": 2}),
    ("dynunet", "DynUNet", PLANE,
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "kernel_size": [3, 3, 3],
      "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 8, 8],
      "deep_supervision": True}),
    ("attention_unet", "AttentionUnet", PLANE,
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (8, 8, 8),
      "strides": (2, 2)}),
    ("diffusion_unet", "DiffusionModelUNet",
     lambda g: {"0": numbers(g, 2, 1, 16, 16), "1": whole(g, 1000, 2), "2": numbers(g, 2, 3, 6)},
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "num_res_blocks": 1,
      "channels": (8, 8), "attention_levels": (False, True), "norm_num_groups": 4,
      "num_head_channels": 4, "with_conditioning": True, "cross_attention_dim": 6}),
    ("vqvae", "VQVAE", PLANE,
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 8),
      "num_res_layers": 1, "num_res_channels": (8, 8),
      "downsample_parameters": ((2, 4, 1, 1),) * 2, "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
      "num_embeddings": 8, "embedding_dim": 8, "ddp_sync": False}),
    ("densenet", "DenseNet", PLANE,
     {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 8,
      "growth_rate": 4, "block_config": (2, 2)}),
    ("vit", "ViT", PLANE,
     {"in_channels": 1, "img_size": 32, "patch_size": 8, "hidden_size": 24, "mlp_dim": 24,
      "num_layers": 2, "num_heads": 2, "classification": True, "spatial_dims": 2}),
    ("highresnet", "HighResNet", PLANE, {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}),
):  # fmt: skip
    add(f"monai_{name}", MEDICAL, f"{NETS}:{kind}", draw, **options)


FLOWS = "normalising flows, ODEs and operators"


class Density(nn.Module):
    """The mean negative logarithm of a flow's density, which it is trained on."""

    def __init__(self, flow: nn.Module, density: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.flow, self.density = flow, density

    def forward(self, x: Tensor) -> Tensor:
        return -self.density(self.flow, x).mean()


def flow_log_prob(flow: Any, x: Tensor) -> Tensor:
    log: Tensor = flow.log_prob(x)
    return log


def zuko_log_prob(flow: Any, x: Tensor) -> Tensor:
    log: Tensor = flow().log_prob(x)
    return log


HIDDEN = {"hidden_features": (16, 16)}
COUPLED = {"refused": "a buffer sets shapes: a mask says which features are kept"}
for name, kind, options, expected in (
    ("maf", "MAF", {"transforms": 2} | HIDDEN, {}),
    ("nice", "NICE", {"transforms": 2} | HIDDEN, COUPLED),
    ("realnvp", "RealNVP", {"transforms": 2} | HIDDEN, COUPLED),
    ("nsf", "NSF", {"transforms": 2, "bins": 4} | HIDDEN, {}),
    ("naf", "NAF", {"transforms": 1} | HIDDEN, {}),
    ("gf", "GF", {"transforms": 2, "components": 3} | HIDDEN, {}),
    ("bpf", "BPF", {"transforms": 1, "degree": 4} | HIDDEN, {}),
    ("sospf", "SOSPF", {"transforms": 1, "degree": 2, "polynomials": 2} | HIDDEN, {}),
    ("gmm", "GMM", {"components": 3}, {}),
    ("cnf", "CNF", HIDDEN, {"refused": "the step of an adaptive ODE solver depends on the data"}),
):
    REGISTRY.add(f"zuko_{name}", FLOWS, packages=True, **expected)(
        lambda kind=kind, options=options: Model(
            Density(made(f"zuko.flows:{kind}", 4, **options), zuko_log_prob), floats(8, 4)
        )
    )


def normalizing_flow(*layers: nn.Module) -> nn.Module:
    import normflows

    base = normflows.distributions.DiagGaussian(4)
    flow: nn.Module = normflows.NormalizingFlow(base, list(layers))
    return flow


@REGISTRY.add("normflows_realnvp", FLOWS, packages=True)
def normflows_realnvp() -> Model:
    import normflows as nf

    layers = [
        layer
        for _ in range(2)
        for layer in (
            nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 8, 4], init_zeros=False)),
            nf.flows.Permute(4, mode="swap"),
        )
    ]
    return Model(Density(normalizing_flow(*layers), flow_log_prob), floats(8, 4))


@REGISTRY.add("normflows_actnorm", FLOWS, packages=True, refused="an if on a buffer")
def normflows_actnorm() -> Model:
    import normflows as nf

    layers = [nf.flows.ActNorm(4), nf.flows.LULinearPermute(4)]
    return Model(Density(normalizing_flow(*layers), flow_log_prob), floats(8, 4))


@REGISTRY.add("normflows_spline", FLOWS, packages=True, refused="inside is found by a boolean mask")
def normflows_spline() -> Model:
    import normflows as nf

    layers = [nf.flows.CoupledRationalQuadraticSpline(4, 1, 8)]
    return Model(Density(normalizing_flow(*layers), flow_log_prob), floats(8, 4))


@REGISTRY.add(
    "normflows_residual", FLOWS, packages=True, refused="a parameter says how many terms are drawn"
)
def normflows_residual() -> Model:
    import normflows as nf

    net = nf.nets.LipschitzMLP([4, 8, 4], init_zeros=False, lipschitz_const=0.9)
    layers = [nf.flows.Residual(net, reduce_memory=False, brute_force=False)]
    return Model(Density(normalizing_flow(*layers), flow_log_prob), floats(8, 4))


def nflow(name: str, transform: str, expected: str = "", **options: Any) -> None:
    def build() -> Model:
        from nflows.distributions import StandardNormal
        from nflows.flows import Flow

        layer = made(f"nflows.transforms.{transform}", features=4, hidden_features=8, **options)
        return Model(Density(Flow(layer, StandardNormal([4])), flow_log_prob), floats(8, 4))

    REGISTRY.add(f"nflows_{name}", FLOWS, packages=True, refused=expected)(build)


nflow("maf", "autoregressive:MaskedAffineAutoregressiveTransform")
nflow(
    "spline", "autoregressive:MaskedPiecewiseRationalQuadraticAutoregressiveTransform",
    "inside is found by a boolean mask", tails="linear", tail_bound=3.0, num_bins=4,
)  # fmt: skip


class Field(nn.Module):
    """The right side of an ordinary differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)


class Ode(nn.Module):
    def __init__(self, solve: str, method: str, buffer: bool) -> None:
        super().__init__()
        self.field, self.method = Field(), method
        self.solve = getattr(import_module("torchdiffeq"), solve)
        self.times = torch.linspace(0, 1, 4)
        if buffer:
            del self.times
            self.register_buffer("times", torch.linspace(0, 1, 4))

    def forward(self, y: Tensor) -> Tensor:
        path: Tensor = self.solve(self.field, y, self.times, method=self.method)
        return path[-1]


ADAPTIVE = {"refused": "the step of an adaptive ODE solver depends on the data"}
for name, solve, method, buffer, expected in (
    ("euler", "odeint", "euler", False, {}),
    ("rk4", "odeint", "rk4", False, {}),
    ("rk4_buffer", "odeint", "rk4", True, {"refused": "times that are a buffer are asserted"}),
    ("explicit_adams", "odeint", "explicit_adams", False, {}),
    ("dopri5", "odeint", "dopri5", False, ADAPTIVE),
    ("adjoint_rk4", "odeint_adjoint", "rk4", False, {}),
    ("adjoint_dopri5", "odeint_adjoint", "dopri5", False, ADAPTIVE),
):
    REGISTRY.add(f"torchdiffeq_{name}", FLOWS, packages=True, **expected)(
        lambda solve=solve, method=method, buffer=buffer: Model(
            Ode(solve, method, buffer), floats(6, 4), squares
        )
    )

FIELDS = floats(2, 2, 16, 16)
MODES = {
    "n_modes": (6, 6),
    "in_channels": 2,
    "out_channels": 1,
    "hidden_channels": 8,
    "n_layers": 2,
}
add("fno", FLOWS, "neuralop.models:FNO", FIELDS, **MODES)
add("fno1d", FLOWS, "neuralop.models:FNO", floats(2, 2, 32), **(MODES | {"n_modes": (8,)}),
    norm="instance_norm", domain_padding=0.25)  # fmt: skip
add("fno_complex", FLOWS, "neuralop.models:FNO",
    lambda g: {"0": torch.complex(numbers(g, 2, 2, 16, 16), numbers(g, 2, 2, 16, 16))}, **MODES,
    complex_data=True, positional_embedding=None)  # fmt: skip
add("tfno", FLOWS, "neuralop.models:TFNO", FIELDS, **MODES, factorization="Tucker", rank=0.5,
    implementation="factorized")  # fmt: skip
add("uno", FLOWS, "neuralop.models:UNO", FIELDS, in_channels=2, out_channels=1, hidden_channels=8,
    lifting_channels=8, projection_channels=8, n_layers=3, uno_out_channels=[8, 8, 8],
    uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
    channel_mlp_skip="linear")  # fmt: skip
add("codano", FLOWS, "neuralop.models:CODANO", floats(2, 2, 16, 16), n_layers=1, n_modes=[[4, 4]],
    n_heads=[1], attention_scaling_factors=[0.5], output_variable_codimension=1,
    hidden_variable_codimension=2, lifting_channels=4, projection_channels=4,
    per_layer_scaling_factors=[[1, 1]])  # fmt: skip

PARTS = "layers of other packages"
SEQUENCES = floats(2, TOKENS, 16)


@REGISTRY.add("mambapy_mamba", PARTS, packages=True)
def mambapy() -> Model:
    from mambapy.mamba import Mamba, MambaConfig

    return Model(Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4)), SEQUENCES, squares)


@REGISTRY.add("mambapy_sequential", PARTS, packages=True)
def mambapy_sequential() -> Model:
    from mambapy.mamba import Mamba, MambaConfig

    config = MambaConfig(d_model=16, n_layers=2, d_state=4, pscan=False, inner_layernorms=True)
    return Model(Mamba(config), SEQUENCES, squares)


def equivariant(mode: str) -> Model:
    """Batzner et al., "NequIP": tensor products of features with spherical harmonics, and gates."""
    import e3nn
    from e3nn import nn as equivariant_layers
    from e3nn import o3

    e3nn.set_optimization_defaults(jit_mode=mode)

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scalars, gates, gated = o3.Irreps("4x0e"), o3.Irreps("2x0e"), o3.Irreps("2x1o")
            self.gate = equivariant_layers.Gate(
                scalars, [torch.tanh], gates, [torch.sigmoid], gated
            )
            self.sphere = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct(
                "4x0e + 2x1o", self.sphere, self.gate.irreps_in, shared_weights=False
            )
            self.weights = nn.Sequential(
                nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, self.product.weight_numel)
            )
            self.linear = o3.Linear(self.gate.irreps_out, "1x0e + 1x1o")

        def forward(self, x: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            vectors = positions[source] - positions[target]
            sphere = o3.spherical_harmonics(self.sphere, vectors, True, normalization="component")
            weights = self.weights(vectors.norm(dim=1, keepdim=True))
            messages = self.product(x[source], sphere, weights)
            return self.linear(
                self.gate(messages.new_zeros(6, messages.shape[1]).index_add(0, target, messages))
            )

    def draw(generator: torch.Generator) -> Batch:
        source = whole(generator, 6, 20)
        target = (source + 1 + whole(generator, 5, 20)) % 6
        positions = numbers(generator, 6, 3)
        return {"0": numbers(generator, 6, 10), "1": positions, "2": torch.stack([source, target])}

    return Model(Convolution(), draw, squares)


REGISTRY.add("e3nn", PARTS, packages=True)(lambda: equivariant("eager"))
REGISTRY.add("e3nn_torchscript", PARTS, packages=True, refused="TorchScript")(
    lambda: equivariant("script")
)
add("egnn", PARTS, "egnn_pytorch:EGNN",
    lambda g: {"0": numbers(g, 1, 6, 8), "1": numbers(g, 1, 6, 3)}, dim=8, m_dim=4)  # fmt: skip
add("egnn_network", PARTS, "egnn_pytorch:EGNN_Network",
    lambda g: {"0": whole(g, 9, 1, 8), "1": numbers(g, 1, 8, 3)}, depth=2, dim=8, num_tokens=9,
    num_positions=8, num_nearest_neighbors=3)  # fmt: skip
add("conformer", PARTS, "conformer:Conformer", SEQUENCES, dim=16, depth=2, dim_head=8, heads=2,
    ff_mult=2, conv_kernel_size=7)  # fmt: skip
add("siren", PARTS, "siren_pytorch:SirenNet", floats(10, 2), 2, 16, 3, 3)
add("halonet", PARTS, "halonet_pytorch:HaloAttention", floats(2, 8, 8, 8), dim=8, block_size=4,
    halo_size=2, dim_head=4, heads=2)  # fmt: skip
add("lambda_layer", PARTS, "lambda_networks:LambdaLayer", floats(2, 8, 8, 8), 8, dim_k=4, r=3,
    heads=2, dim_out=8)  # fmt: skip
add("axial", PARTS, "axial_attention:AxialAttention", floats(2, 8, 6, 6), dim=8, heads=2,
    dim_index=1)  # fmt: skip
add("axial_reversible", PARTS, "axial_attention:AxialImageTransformer", floats(2, 8, 6, 6), dim=8,
    depth=2, heads=2, axial_pos_emb_shape=(6, 6))  # fmt: skip
add("mlp_mixer", PARTS, "mlp_mixer_pytorch:MLPMixer", IMAGES, image_size=32, channels=3,
    patch_size=8, dim=16, depth=2, num_classes=5)  # fmt: skip
add("vector_quantize", PARTS, "vector_quantize_pytorch:VectorQuantize", floats(2, 12, 8), dim=8,
    codebook_dim=4, codebook_size=16, expected={"refused": "an if on a buffer"})  # fmt: skip
add("residual_fsq", PARTS, "vector_quantize_pytorch:ResidualFSQ", floats(2, 12, 8), dim=8,
    levels=[5, 3], num_quantizers=2)  # fmt: skip
add("simvq", PARTS, "vector_quantize_pytorch:SimVQ", floats(2, 12, 8), dim=8, codebook_size=16)
add("kan", PARTS, "kan:KAN", floats(12, 3), width=[3, 4, 2], auto_save=False, save_act=False,
    symbolic_enabled=False)  # fmt: skip
add("tcn", PARTS, "pytorch_tcn:TCN", floats(2, 6, 20), num_inputs=6, num_channels=[8, 8],
    dropout=0.0)  # fmt: skip
add("cfc", PARTS, "ncps.torch:CfC", SEQUENCES, 16, 8)
add("ltc", PARTS, "ncps.torch:LTC", floats(2, 5, 4), 4, 6)
add("tabnet", PARTS, "pytorch_tabnet.tab_network:TabNet", floats(16, 6), 6, 3, n_d=4, n_a=4,
    n_steps=2, virtual_batch_size=8, group_attention_matrix=torch.eye(6))  # fmt: skip


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import entmax

        self.scores = nn.Linear(8, 9)
        self.outer, self.inner = entmax.Entmax15(-1), entmax.Sparsemax(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        return torch.stack([self.outer(scores), self.inner(scores)])


REGISTRY.add("entmax", PARTS, packages=True)(lambda: Model(Sparse(), floats(4, 8), squares))
add("efficientnet_pytorch", PARTS, "package_cases:efficientnet", IMAGES)


def efficientnet() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name(
        "efficientnet-b0", num_classes=5, image_size=32, drop_connect_rate=0.0
    )


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchcrf import CRF

        self.emissions = nn.Linear(8, 5)
        self.crf = CRF(5, batch_first=True)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        loss: Tensor = -self.crf(self.emissions(x), tags)
        return loss


REGISTRY.add("crf", PARTS, packages=True)(
    lambda: Model(Tagger(), lambda g: {"0": numbers(g, 3, 7, 8), "1": whole(g, 5, 3, 7)})
)


@REGISTRY.add("open_clip", PARTS, packages=True)
def open_clip() -> Model:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=TOKENS, vocab_size=VOCABULARY, width=32, heads=2, layers=2)
    module = CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    return Model(
        module,
        lambda g: {"0": numbers(g, 2, 3, 32, 32), "1": whole(g, VOCABULARY, 2, TOKENS)},
        all_squares,
        checkpoint=lambda module: module.set_grad_checkpointing(True),
    )


YOLO = "YOLO (ultralytics)"


def yolo(name: str, kind: str, fresh: str = "") -> None:
    """`fresh` says why the network is refused that has never run."""

    def build() -> Model:
        tasks = import_module("ultralytics.nn.tasks")
        module = getattr(tasks, kind)(name + ".yaml", ch=3, nc=4, verbose=False).eval()
        with torch.no_grad():
            module = module if fresh else run_once(module, torch.zeros(1, 3, 64, 64))
        return Model(without_chance(module), floats(1, 3, 64, 64), all_squares)

    named = name.replace("-", "_") + "_fresh" * bool(fresh)
    REGISTRY.add(named, YOLO, packages=True, refused=fresh)(build)


yolo("yolov8n", "DetectionModel")
yolo("yolov8n", "DetectionModel", "its first inference leaves its anchors in an attribute")
yolo("yolov8n-seg", "SegmentationModel")
yolo("yolov8n-pose", "PoseModel")
yolo("yolo11n-cls", "ClassificationModel")
yolo("yolo12n", "DetectionModel")
yolo("yolov10n", "DetectionModel")
