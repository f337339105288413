"""Graph networks, recommenders, diffusion, and what people write themselves."""

from typing import Any

import torch
import torch.nn.functional as F
from cases import REGISTRY, Batch, Model, numbers, whole, without_chance
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

NODES, EDGES = 12, 40


def graph_batch(generator: torch.Generator) -> Batch:
    return {"0": numbers(generator, NODES, 8), "1": whole(generator, NODES, 2, EDGES)}


def node_classes(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (whole(generator, 3, NODES),)


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def squares(output: Tensor, *_: Tensor) -> Tensor:
    return output.square().mean()


def geometric(name: str, **options: Any) -> Model:
    from torch_geometric.nn import models

    module = getattr(models, name)(8, 16, 2, 3, **options)
    return Model(module, graph_batch, entropy, node_classes)


GRAPHS = "graph networks (torch_geometric)"
REGISTRY.add("pyg_graphsage", GRAPHS)(lambda: geometric("GraphSAGE"))
REGISTRY.add("pyg_gin", GRAPHS)(lambda: geometric("GIN"))
REGISTRY.add("pyg_gat", GRAPHS)(lambda: geometric("GAT", add_self_loops=False))
REGISTRY.add("pyg_gcn", GRAPHS)(lambda: geometric("GCN", add_self_loops=False))
REGISTRY.add("pyg_gcn_self_loops", GRAPHS, refused="self loops are found by a boolean mask")(
    lambda: geometric("GCN")
)

RECOMMENDERS = "recommenders"


@REGISTRY.add("pyg_lightgcn", RECOMMENDERS)
def lightgcn() -> Model:
    from torch_geometric.nn.models import LightGCN

    return Model(
        LightGCN(NODES, 8, 2),
        lambda g: {"0": whole(g, NODES, 2, EDGES)},
        lambda output: output.square().mean(),
    )


def clicks(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (whole(generator, 2, 16).float(),)


def clicked(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


class Dlrm(nn.Module):
    """Naumov et al., "Deep Learning Recommendation Model", 2019: dense features through an MLP,
    sparse ones through embedding bags, dot products of all pairs, another MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [x, *(table(bags[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(rows, 1)
        products = stacked @ stacked.transpose(1, 2)
        first, second = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, first, second]], 1)).squeeze(1)


@REGISTRY.add("dlrm", RECOMMENDERS)
def dlrm() -> Model:
    return Model(
        Dlrm(),
        lambda g: {"dense": numbers(g, 16, 5), "bags": whole(g, 20, 16, 3, 4)},
        clicked,
        clicks,
    )


class DeepFm(nn.Module):
    """Guo et al., "DeepFM", 2017: first-order terms, a factorization machine and an MLP over the
    same embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(60, 1)
        self.factors = nn.Embedding(60, 8)
        self.deep = nn.Sequential(
            nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        )
        self.register_buffer("offsets", torch.tensor([0, 20, 40]))

    def forward(self, fields: Tensor) -> Tensor:
        index = fields + self.offsets
        v = self.factors(index)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return self.first(index).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)


@REGISTRY.add("deepfm", RECOMMENDERS)
def deepfm() -> Model:
    return Model(DeepFm(), lambda g: {"0": whole(g, 20, 16, 3)}, clicked, clicks)


class Ncf(nn.Module):
    """He et al., "Neural Collaborative Filtering", 2017: NeuMF."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.ModuleList([nn.Embedding(30, 8), nn.Embedding(30, 8)])
        self.items = nn.ModuleList([nn.Embedding(40, 8), nn.Embedding(40, 8)])
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        factors = self.users[0](user) * self.items[0](item)
        deep = self.mlp(torch.cat([self.users[1](user), self.items[1](item)], 1))
        return self.head(torch.cat([factors, deep], 1)).squeeze(1)


@REGISTRY.add("ncf", RECOMMENDERS)
def ncf() -> Model:
    return Model(
        Ncf(), lambda g: {"user": whole(g, 30, 16), "item": whole(g, 40, 16)}, clicked, clicks
    )


DIFFUSION = "diffusion (diffusers)"


def enable_checkpointing(module: Any) -> None:
    module.enable_gradient_checkpointing()


@REGISTRY.add("diffusers_unet2d", DIFFUSION)
def unet2d() -> Model:
    from diffusers import UNet2DModel

    module = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return Model(
        module,
        lambda g: {"sample": numbers(g, 2, 3, 16, 16), "timestep": whole(g, 1000, 2)},
        lambda output, target: F.mse_loss(output.sample, target),
        lambda g: (numbers(g, 2, 3, 16, 16),),
        checkpoint=enable_checkpointing,
    )


@REGISTRY.add("diffusers_vae", DIFFUSION)
def vae() -> Model:
    from diffusers import AutoencoderKL

    module = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return Model(
        module,
        lambda g: {"sample": numbers(g, 2, 3, 16, 16)},
        lambda output, target: F.mse_loss(output.sample, target),
        lambda g: (numbers(g, 2, 3, 16, 16),),
        checkpoint=enable_checkpointing,
    )


@REGISTRY.add("diffusers_dit", DIFFUSION)
def dit() -> Model:
    from diffusers import DiTTransformer2DModel

    module = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return Model(
        without_chance(module),
        lambda g: {
            "hidden_states": numbers(g, 2, 4, 8, 8),
            "timestep": whole(g, 10, 2),
            "class_labels": whole(g, 10, 2),
        },
        lambda output, target: F.mse_loss(output.sample, target),
        lambda g: (numbers(g, 2, 4, 8, 8),),
        checkpoint=enable_checkpointing,
    )


OWN = "what people write themselves"


def vectors(generator: torch.Generator) -> Batch:
    return {"0": numbers(generator, 6, 8)}


class CheckpointedLoop(nn.Module):
    """One block again and again under a checkpoint: what is recomputed reads the weights anew."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + checkpoint(self.block, x, use_reentrant=False).sin()
        return self.head(x)


REGISTRY.add("checkpointed_loop", OWN)(lambda: Model(CheckpointedLoop(), vectors, squares))


class ReentrantLoop(CheckpointedLoop):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + checkpoint(self.block, self.head(x), use_reentrant=True)
        return self.head(x)


REGISTRY.add("reentrant_loop", OWN)(lambda: Model(ReentrantLoop(), vectors, squares))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids))[0])


REGISTRY.add("tied_language_model", OWN)(
    lambda: Model(
        Tied(),
        lambda g: {"0": whole(g, 20, 3, 7)},
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        lambda g: (whole(g, 20, 3, 7),),
    )
)


class StraightThrough(torch.autograd.Function):
    """Signs forward, the clipped identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = StraightThrough.apply(self.first.weight)
        return self.second(F.linear(x, weight, self.first.bias).tanh())


REGISTRY.add("custom_autograd", OWN)(lambda: Model(Binary(), vectors, squares))


class PackedLstm(nn.Module):
    """Sentences of several lengths, which come with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=7)
        return self.head(out.sum(1))


REGISTRY.add("packed_lstm", OWN, refused="lengths are data: they set shapes")(
    lambda: Model(
        PackedLstm(),
        lambda g: {"0": whole(g, 20, 3, 7), "1": torch.tensor([5, 7, 2])},
        lambda o, t: F.cross_entropy(o, t),
        lambda g: (whole(g, 2, 3),),
    )
)


class Decoder(nn.Module):
    """One token a step, with keys and values of all earlier ones handed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(
        self, token: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, grown = self.embedding(token), []
        for layer, (keys, values) in zip(self.qkv, cache, strict=True):
            q, k, v = layer(x).chunk(3, -1)
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            x = x + F.scaled_dot_product_attention(q, keys, values)
            grown.append((keys, values))
        return self.head(x), grown


def cached(generator: torch.Generator) -> Batch:
    cache = [(numbers(generator, 2, 5, 16), numbers(generator, 2, 5, 16)) for _ in range(2)]
    return {"token": whole(generator, 20, 2, 1), "cache": cache}


REGISTRY.add("kv_cache", OWN)(
    lambda: Model(Decoder(), cached, lambda output: output[0].square().mean())
)


@REGISTRY.add("llama_kv_cache", OWN, training=False)
def llama_cache() -> Model:
    import transformers
    from transformers_cases import GROUPED

    config = transformers.LlamaConfig(**GROUPED)

    def draw(generator: torch.Generator) -> Batch:
        cache = transformers.DynamicCache(config=config)
        for layer in range(2):
            cache.update(numbers(generator, 2, 2, 5, 8), numbers(generator, 2, 2, 5, 8), layer)
        return {"input_ids": whole(generator, 60, 2, 1), "past_key_values": cache}

    return Model(transformers.LlamaForCausalLM(config), draw)


@REGISTRY.add("lora_llama", OWN)
def lora() -> Model:
    import peft
    import transformers
    from transformers_cases import GROUPED, labelled_text, own_loss

    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = peft.get_peft_model(plain, config)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:  # zero at first; other values show more
            nn.init.normal_(parameter, std=0.1)
    return Model(module, labelled_text, own_loss, labels=("labels",))


@REGISTRY.add("weight_norm_conv", OWN)
def weight_norm() -> Model:
    from torch.nn.utils.parametrizations import orthogonal, spectral_norm
    from torch.nn.utils.parametrizations import weight_norm as normed

    module = nn.Sequential(
        normed(nn.Conv1d(4, 8, 3)), nn.ReLU(), spectral_norm(nn.Conv1d(8, 8, 3)), nn.Flatten(),
        orthogonal(nn.Linear(8 * 6, 8)),
    )  # fmt: skip
    return Model(module, lambda g: {"0": numbers(g, 3, 4, 10)}, squares)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


REGISTRY.add("autocast", OWN, double=False)(
    lambda: Model(Mixed(), vectors, lambda o: o.float().square().mean())
)
REGISTRY.add("data_parallel", OWN)(
    lambda: Model(nn.DataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), vectors, squares)
)
REGISTRY.add("torch_transformer", OWN)(
    lambda: Model(
        nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True),
        lambda g: {"src": numbers(g, 2, 6, 16), "tgt": numbers(g, 2, 5, 16)},
        squares,
    )
)
REGISTRY.add("bidirectional_lstm", OWN)(
    lambda: Model(
        nn.LSTM(8, 8, 2, bidirectional=True),
        lambda g: {"0": numbers(g, 5, 3, 8)},
        lambda o: o[0].square().mean(),
    )
)


class LayerMoved(nn.Module):
    """The router of transformers' SwitchTransformers moves its layer to the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(x.dtype)
        return self.layer(x)


REGISTRY.add("layer_moved", OWN)(lambda: Model(LayerMoved(), vectors, squares))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -x


REGISTRY.add("data_branch", OWN, refused="an if on a tensor")(
    lambda: Model(Branch(), vectors, squares)
)
REGISTRY.add("sparse_embedding", OWN, refused="sparse gradients")(
    lambda: Model(nn.Embedding(20, 8, sparse=True), lambda g: {"0": whole(g, 20, 6)}, squares)
)
REGISTRY.add("torchscript", OWN, refused="TorchScript")(
    lambda: Model(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), vectors, squares)
)


@REGISTRY.add("quantised", OWN, refused="quantised weights", training=False, double=False)
def quantised() -> Model:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    return Model(torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, torch.qint8), vectors)
