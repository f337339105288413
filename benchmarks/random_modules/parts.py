"""The leaves of random modules: each maps [ROWS, WIDTH] to [ROWS, WIDTH].

A leaf is a function whose arguments' names say what its module holds:

    x       the input               self    the module itself
    w       parameter [WIDTH, WIDTH]    b   parameter [WIDTH]
    mean    buffer [WIDTH]          memory  buffer [3, WIDTH]      count   int64 buffer []
    late    non-persistent buffer [WIDTH]

or a subclass of nn.Module made without arguments. Each belongs to a family, which results are
counted by. Names are what a case's text refers to.
"""

import functools
import inspect
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

ROWS, WIDTH = 4, 6
HALF = WIDTH // 2

LEAVES = {}  # name -> () -> nn.Module
FAMILIES = {}  # family -> names


def leaf(family):
    """Register a function or a class as a leaf of the family."""

    def register(given):
        name = given.__name__.strip("_").lower().replace("_", "-")
        assert name not in LEAVES, name
        LEAVES[name] = given if isinstance(given, type) else functools.partial(Leaf, given)
        FAMILIES.setdefault(family, []).append(name)
        return given

    return register


def weights(*shape):
    return nn.Parameter(0.4 * torch.randn(*shape))


MADE = {
    "w": lambda: weights(WIDTH, WIDTH),
    "b": lambda: weights(WIDTH),
    "mean": lambda: torch.zeros(WIDTH),
    "memory": lambda: 0.4 * torch.randn(3, WIDTH),
    "count": lambda: torch.zeros((), dtype=torch.int64),
    "late": lambda: 0.4 * torch.randn(WIDTH),
}


class Leaf(nn.Module):
    """A function with the parameters and buffers that its arguments name."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.names = list(inspect.signature(function).parameters)[1:]
        for name in self.names:
            if name in ("w", "b"):
                self.register_parameter(name, MADE[name]())
            elif name != "self":
                self.register_buffer(name, MADE[name](), persistent=name != "late")

    def forward(self, x):
        held = {n: self if n == "self" else getattr(self, n) for n in self.names}
        return self.function(x, **held)


# Layers ----------------------------------------------------------------------------------------


@leaf("layers")
def linear(x, w, b):
    return F.linear(x, w, b)


@leaf("layers")
class Linear_Module(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


@leaf("layers")
def product(x, w):
    return x @ w


@leaf("layers")
def tanh(x):
    return x.tanh()


@leaf("layers")
def gelu(x):
    return F.gelu(x)


@leaf("layers")
def softplus_silu(x, b):
    return F.softplus(x + b) - F.silu(x)


@leaf("layers")
def scale(x, b):
    return x * (1 + b)


@leaf("layers")
class Batch_Norm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH)


@leaf("layers")
class Batch_Norm_Cumulative(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH, momentum=None)  # the average over all batches, by its counter


@leaf("layers")
class Batch_Norm_Frozen(nn.BatchNorm1d):
    """In evaluation mode whatever the model is in, as in fine-tuning."""

    def __init__(self):
        super().__init__(WIDTH)

    def train(self, mode=True):
        return super().train(False)


@leaf("layers")
class Batch_Norm_Stateless(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH, affine=False, track_running_stats=False)


@leaf("layers")
class Instance_Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.norm(x.view(2, 2, WIDTH)).reshape(ROWS, WIDTH)


@leaf("layers")
class Group_Norm(nn.GroupNorm):
    def __init__(self):
        super().__init__(2, WIDTH)


@leaf("layers")
class Layer_Norm(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)


@leaf("layers")
class Rms_Norm(nn.RMSNorm):
    def __init__(self):
        super().__init__(WIDTH)


@leaf("layers")
class Conv_1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None]).sum(1)


@leaf("layers")
class Conv_2d_Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 2, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.conv(x.view(ROWS, 1, 2, 3))).amax((2, 3))


@leaf("layers")
class Transposed_Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose1d(2, 1, 2, stride=2, padding=0)

    def forward(self, x):
        return self.conv(x.view(ROWS, 2, HALF))[:, 0]


@leaf("layers")
class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, padding_idx=0)

    def forward(self, x):
        return x + self.table((x > 0).sum(1) % 5)


@leaf("layers")
class Embedded_Renormed(nn.Module):
    """max_norm writes the table before it is read."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x):
        return x + self.table((x > 0).sum(1) % 5)


@leaf("layers")
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, WIDTH, mode="sum")

    def forward(self, x):
        return x - self.bag(x.argsort(1))


@leaf("layers")
class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, HALF, WIDTH)

    def forward(self, x):
        return self.bilinear(x, x[:, :HALF].tanh())


@leaf("layers")
def einsum(x, w, b):
    return torch.einsum("bi,ij,j->bj", x, w, b)


@leaf("layers")
def addmm_baddbmm(x, w, b):
    stacked = torch.baddbmm(b, x.view(2, 2, WIDTH), w.expand(2, -1, -1), alpha=0.5)
    return torch.addmm(x, stacked.reshape(ROWS, WIDTH), w, beta=0.5)


@leaf("layers")
def gather_scatter(x, b):
    order = x.argsort(1)
    return torch.zeros_like(x).scatter_add(1, order, x.gather(1, order.flip(1)) * b)


@leaf("layers")
def masked(x, b):
    return torch.where(x > b, x, 0.1 * x).masked_fill(x > 2, 1.0)


@leaf("layers")
def logsumexp_cumsum(x, b):
    return x - torch.logsumexp(x + b, 1, keepdim=True) + 0.1 * x.cumsum(1)


@leaf("layers")
def top_two(x, b):
    values, places = x.topk(2, dim=1)
    return x * b + values.sum(1, keepdim=True) + 0.1 * places.to(x.dtype).mean()


@leaf("layers")
def spectrum(x, b):
    turned = torch.fft.rfft(x * b, dim=1)
    return torch.fft.irfft(turned * turned.abs().tanh(), n=WIDTH, dim=1)


@leaf("layers")
def complex_turn(x, b):
    pairs = torch.view_as_complex(x.reshape(ROWS, HALF, 2).contiguous())
    turn = torch.polar(torch.ones_like(b[:HALF]), b[:HALF])
    return torch.view_as_real(pairs * turn).reshape(ROWS, WIDTH)


@leaf("layers")
def solved(x, w):
    return torch.linalg.solve(3 * torch.eye(WIDTH) + w @ w.t(), x.t()).t()


@leaf("layers")
def constants(x, b):
    table = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.25, 1.5])
    return x * table + b * torch.arange(WIDTH)


@leaf("layers")
def identity(x):
    return x


@leaf("layers")
def parameter_returned(x, w):
    return w[:ROWS]


@leaf("layers")
def parameter_expanded(x, b):
    return b.expand_as(x)


@leaf("layers")
class Parameter_List(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([weights(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"b": weights(WIDTH)})

    def forward(self, x):
        for weight in self.all:
            x = (x @ weight + self.named["b"]).tanh()
        return x


@leaf("layers")
class Scripted(nn.Module):
    """A part in TorchScript."""

    def __init__(self):
        super().__init__()
        self.layer = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layer(x)


@leaf("layers")
class Fake_Quantised(nn.Module):
    """As in quantisation-aware training."""

    def __init__(self):
        super().__init__()
        self.quantise = torch.ao.quantization.FakeQuantize()
        self.layer = square()

    def forward(self, x):
        return self.layer(self.quantise(x.float()).to(x.dtype))


@leaf("layers")
class Two_Devices_Unwrapped(nn.Module):
    """DataParallel where there is no GPU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.DataParallel(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layer(x)


@leaf("layers")
def half_frozen(x, self, w, b):
    self.w.requires_grad_(False)
    return x @ w + b


class Frozen(Leaf):
    def __init__(self, function):
        super().__init__(function)
        self.requires_grad_(False)


@leaf("layers")
class Frozen_Linear(Frozen):
    def __init__(self):
        super().__init__(linear)


@leaf("layers")
class Unused_Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(3)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


# Attention and recurrence ----------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x, **options):
        x = x.view(2, 2, WIDTH)
        return self.attention(x, x, x, **options)[0].reshape(ROWS, WIDTH)


@leaf("attention")
class Mha(Attention):
    pass


@leaf("attention")
class Mha_No_Weights(Attention):
    def forward(self, x):
        return super().forward(x, need_weights=False)


@leaf("attention")
class Mha_Causal(Attention):
    def forward(self, x):
        mask = torch.triu(torch.ones(2, 2, dtype=torch.bool), 1)
        return super().forward(x, attn_mask=mask, is_causal=True, need_weights=False)


@leaf("attention")
class Mha_Twice(Attention):
    """One attention used twice, its projection once more by itself."""

    def forward(self, x):
        x = super().forward(x) + super().forward(x.tanh())
        return self.attention.out_proj(x)


@leaf("attention")
class Encoder_Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(2, 2, WIDTH)).reshape(ROWS, WIDTH)


@leaf("attention")
class Decoder_Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, norm_first=True)

    def forward(self, x):
        x = x.view(2, 2, WIDTH)
        return self.layer(x, x.flip(0)).reshape(ROWS, WIDTH)


@leaf("attention")
def scaled_dot_product(x, w):
    q, k, v = (part.view(1, ROWS, 2, HALF).transpose(1, 2) for part in (x @ w, x, x * 0.5))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return found.transpose(1, 2).reshape(ROWS, WIDTH)


@leaf("attention")
def softmax_attention(x, w, b):
    scores = torch.einsum("id,de,je->ij", x, w, x) / math.sqrt(WIDTH)
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return torch.softmax(scores, 1) @ x + b


class Recurrent(nn.Module):
    def __init__(self, made, cell=False):
        super().__init__()
        self.layer, self.cell = made, cell

    def forward(self, x):
        if not self.cell:
            return self.layer(x.view(2, 2, WIDTH))[0].reshape(ROWS, -1)
        state = None
        for part in x.view(2, 2, WIDTH):
            state = self.layer(part, state)
        last = state[0] if isinstance(state, tuple) else state
        return x + last.repeat(2, 1)


@leaf("recurrent")
class Lstm(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM(WIDTH, WIDTH, num_layers=2))


@leaf("recurrent")
class Lstm_Both_Ways(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM(WIDTH, HALF, bidirectional=True, batch_first=True))


@leaf("recurrent")
class Lstm_Projected(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM(WIDTH, 8, proj_size=WIDTH))


@leaf("recurrent")
class Gru(Recurrent):
    def __init__(self):
        super().__init__(nn.GRU(WIDTH, WIDTH))


@leaf("recurrent")
class Rnn(Recurrent):
    def __init__(self):
        super().__init__(nn.RNN(WIDTH, WIDTH, nonlinearity="relu"))


@leaf("recurrent")
class Lstm_Cell(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTMCell(WIDTH, WIDTH), cell=True)


@leaf("recurrent")
class Gru_Cell(Recurrent):
    def __init__(self):
        super().__init__(nn.GRUCell(WIDTH, WIDTH), cell=True)


# Views -----------------------------------------------------------------------------------------


@leaf("views")
def turned(x, w):
    return (w @ x.t()).t()


@leaf("views")
def reshaped(x, b):
    return (x.t().reshape(3, -1) * b[:3, None]).reshape(WIDTH, ROWS).mT


@leaf("views")
def expanded(x, b):
    return (x[:, None].expand(-1, 2, -1) * b.view(1, 2, HALF).repeat(1, 1, 2)).sum(1)


@leaf("views")
def chunks_swapped(x, b):
    left, right = (x * b).chunk(2, dim=1)
    return torch.cat([right, left], 1)


@leaf("views")
def slices(x, b):
    return torch.cat([x[:, ::2] * b[:HALF], x[:, 1::2] + b[HALF:]], 1)


@leaf("views")
def windows(x, b):
    return F.pad(x * b, (1, 1)).unfold(1, 3, 1).mean(-1)


@leaf("views")
def diagonal(x, w):
    return x * w.diagonal() + w.t().diagonal(1).sum()


@leaf("views")
def strided(x, w):
    return x * w.as_strided((WIDTH,), (WIDTH + 1,))


@leaf("views")
def unbound(x, w):
    first, *_, last = w.unbind(0)
    return torch.stack([row * first + last for row in x.unbind(0)])


@leaf("views")
def split_moved(x, b):
    parts = (x * b).split([1, 2, 3], dim=1)
    return torch.cat([part.movedim(0, 1).flip(0).movedim(1, 0) for part in parts], 1)


@leaf("views")
def flattened_weight(x, w):
    return x * w.view(-1)[3 : 3 + WIDTH] + w.flatten()[-1]


@leaf("views")
def bits(x, b):
    whole = torch.int64 if x.dtype == torch.float64 else torch.int32
    negative = (x.detach().view(whole) < 0).to(x.dtype)
    return x * b + negative


# In-place ops ----------------------------------------------------------------------------------


@leaf("in-place")
def added_in_place(x, b):
    return (x * 1.0).add_(b).mul_(0.5).relu_()


@leaf("in-place")
def column_written(x, b):
    y = x.clone()
    y[:, 1] = b[:ROWS] * x[:, 0]
    return y


@leaf("in-place")
def columns_added(x, b):
    y = x * 2
    y[:, ::2] += b[:HALF]
    y[1:, 3] *= b[3]
    return y


@leaf("in-place")
def rows_written(x, b):
    y = x.sin()
    y[torch.tensor([0, 2])] = b
    y[-1, 1:4] = x[0, 1:4]
    return y


@leaf("in-place")
def index_put(x, b):
    y = x + 0
    places = torch.tensor([0, 1, 1]), torch.tensor([2, 2, 3])
    y.index_put_(places, b[:3], accumulate=True)
    return y.index_put(places, x[0, :3].detach())


@leaf("in-place")
def addcmul(x, w, b):
    y = x @ w
    y.addcmul_(x, b.expand_as(x), value=0.3)
    return y.addcdiv_(x, 1 + b * b, value=0.1)


@leaf("in-place")
def masked_filled(x, b):
    y = x - b
    y.masked_fill_(x > 0.5, 0.25)
    return y


@leaf("in-place")
def written_by_mask(x, b):
    y = x * b
    y[x > 0] = 0.5
    return y


@leaf("in-place")
def filled_up(x, b):
    y = x.new_zeros(ROWS, WIDTH)
    y[:, :HALF].copy_(x[:, HALF:] * b[:HALF])
    y[:, HALF:] = x[:, :HALF]
    return y


@leaf("in-place")
def view_of_view(x, b):
    y = x * b
    y.view(2, 2, WIDTH)[0].t()[1:3].mul_(0.5)
    return y


@leaf("in-place")
def seen_through_view(x, b):
    y = x + b
    first = y[0]
    other = y.view(-1)
    y.mul_(2)
    other[:3].add_(b[:3])
    return y * first


@leaf("in-place")
def diagonal_filled(x, w):
    y = w.cos() + w
    y.diagonal().add_(1)
    y.fill_diagonal_(0.5)
    return x @ y


@leaf("in-place")
def index_added(x, b):
    y = torch.zeros_like(x)
    y.index_add_(0, torch.tensor([1, 0, 3, 3]), x * b)
    y.scatter_(1, torch.zeros(ROWS, 1, dtype=torch.long), 0.5)
    return y + x


@leaf("in-place")
def turned_in_place(x, w):
    y = x @ w
    y.t_().squeeze_().mul_(0.5)
    return y.t() + 0


@leaf("in-place")
def clamped_lerp(x, b):
    y = x * 1.5
    y.clamp_(-1, 1).lerp_(x, 0.3)
    return y.sub_(b).div_(2)


@leaf("in-place")
def halves_added(x, b):
    left, right = (x + b).chunk(2, 1)
    left = left.clone()
    left += right
    left -= left.mean()
    return torch.cat([left, right], 1)


@leaf("in-place")
def written_out(x, b):
    with torch.no_grad():
        y = torch.empty_like(x)
        torch.mul(x, 0.5, out=y)
        torch.add(y[:, :2], 1, out=y[:, 2:4])
    return x * b + y


@leaf("in-place")
def input_written(x, b):
    """Writes over what it is given, where plain PyTorch allows that."""
    x += 1
    return x * b


@leaf("in-place")
def loop_filled(x, b):
    rows = x.new_empty(ROWS, WIDTH)
    row = b
    for i in range(ROWS):
        row = (row * 0.5 + x[i]).tanh()
        rows[i] = row
    return rows


@leaf("in-place")
def swapped_columns(x, b):
    y = x * b
    y[:, [0, 1]] = y[:, [1, 0]]
    return y


@leaf("in-place")
def activations_in_place(x, b):
    return F.elu(F.leaky_relu(x + b, 0.1, inplace=True) * 2, inplace=True)


@leaf("in-place")
def detached_write(x, b):
    y = x * b
    y.detach()[:, 0].mul_(0.5)  # y sees it, its gradient does not
    return y + x


@leaf("in-place")
def data_write(x, b):
    y = x + b
    y.data.clamp_(-0.5, 0.5)
    return y


# Buffers ---------------------------------------------------------------------------------------


@leaf("buffers")
def running_mean(x, self, mean):
    if self.training:
        self.mean = 0.9 * mean + 0.1 * x.detach().mean(0)
    return x - self.mean


@leaf("buffers")
def running_mean_in_place(x, mean):
    mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - mean


@leaf("buffers")
def counted(x, self, count):
    self.count += 1
    return x / count.to(x.dtype)


@leaf("buffers")
def counted_by_add(x, count, b):
    before = count + 0
    count.add_(2)
    return x * b / (1 + before)


@leaf("buffers")
def late_buffer(x, late):
    late.copy_(x.detach()[0] * 0.1 + late)
    return x + late


@leaf("buffers")
def memory_rolled(x, memory):
    memory[1:] = memory[:-1].clone()
    memory[0] = x.detach().mean(0)
    return x + memory.mean(0)


@leaf("buffers")
def memory_through_view(x, memory):
    memory.view(-1)[::2].mul_(0.5)
    memory.t()[0] += 1
    memory.select(0, 1).data.add_(x.detach()[0])
    return x + memory.sum(0)


@leaf("buffers")
def memory_at_count(x, memory, count):
    place = (count % 3).reshape(1)
    memory.index_copy_(0, place, x.detach().mean(0, keepdim=True))
    count += 1
    return x + memory.mean(0)


@leaf("buffers")
def memory_out(x, memory):
    torch.mul(memory, 0.5, out=memory)
    with torch.no_grad():
        torch.add(memory[0], x[0].detach(), out=memory[0])
    return x * memory.sum(0)


@leaf("buffers")
def read_before_written(x, mean):
    seen = mean.clone()
    alias = mean[:]
    mean += x.detach().sum(0)
    return x + 0.1 * seen - 0.01 * alias


@leaf("buffers")
def written_in_no_grad(x, self, mean, w):
    with torch.no_grad():
        self.mean.lerp_(x.mean(0) @ w, 0.1)
    return x @ w - mean


@leaf("buffers")
def data_assigned(x, self, mean):
    self.mean.data = 0.5 * mean.data + x.detach().mean(0)
    return x - self.mean


@leaf("buffers")
def buffer_returned(x, mean):
    mean += x.detach().mean(0)
    return mean.expand(ROWS, -1)


@leaf("buffers")
class Aliased_Buffers(nn.Module):
    """A buffer that is a view of another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(2, WIDTH))
        self.register_buffer("first", self.whole[0])

    def forward(self, x):
        self.first.add_(x.detach().mean(0))
        return x + self.whole.sum(0)


@leaf("buffers")
class Tied_Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.zeros(WIDTH))
        self.register_buffer("other", self.one)

    def forward(self, x):
        self.one.add_(x.detach().mean(0))
        return x + self.other


@leaf("buffers")
class Averaged_Weights(nn.Module):
    """A moving average of a parameter, kept in a buffer, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", self.online.weight.detach().clone())

    @torch.no_grad()
    def follow(self):
        self.average.mul_(0.9).add_(self.online.weight, alpha=0.1)

    def forward(self, x):
        self.follow()
        return self.online(x) - x @ self.average


@leaf("buffers")
class Momentum_Encoder(nn.Module):
    """A frozen copy of a layer that follows it, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.target.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data = mine.data * 0.9 + other.data * 0.1
            seen = self.target(x)
        return self.online(x) - seen


# Parametrizations ------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def square():
    return nn.Linear(WIDTH, WIDTH)


@leaf("parametrized")
class Weight_Norm(Wrapped):
    def __init__(self):
        super().__init__(parametrizations.weight_norm(square()))


@leaf("parametrized")
class Weight_Norm_Old(Wrapped):
    def __init__(self):
        super().__init__(nn.utils.weight_norm(square()))


@leaf("parametrized")
class Spectral_Norm(Wrapped):
    def __init__(self):
        super().__init__(parametrizations.spectral_norm(square()))


@leaf("parametrized")
class Spectral_Norm_Old(Wrapped):
    def __init__(self):
        super().__init__(nn.utils.spectral_norm(square()))


@leaf("parametrized")
class Orthogonal(Wrapped):
    def __init__(self):
        super().__init__(parametrizations.orthogonal(square()))


@leaf("parametrized")
class Orthogonal_Householder(Wrapped):
    def __init__(self):
        super().__init__(parametrizations.orthogonal(square(), orthogonal_map="householder"))


@leaf("parametrized")
class Orthogonal_Cayley(Wrapped):
    def __init__(self):
        super().__init__(
            parametrizations.orthogonal(square(), orthogonal_map="cayley", use_trivialization=False)
        )


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Shifted(nn.Module):
    """A parametrization with a parameter and a counter of its own."""

    def __init__(self):
        super().__init__()
        self.shift = weights(WIDTH)
        self.register_buffer("uses", torch.zeros(()))

    def forward(self, x):
        self.uses += 1
        return x + self.shift / (1 + self.uses)


@leaf("parametrized")
class Symmetric_Weight(Wrapped):
    def __init__(self):
        super().__init__(square())
        parametrize.register_parametrization(self.layer, "weight", Symmetric())
        parametrize.register_parametrization(self.layer, "weight", Shifted())


@leaf("parametrized")
class Cached_Parametrization(Wrapped):
    def __init__(self):
        super().__init__(parametrizations.weight_norm(square()))

    def forward(self, x):
        with parametrize.cached():
            return self.layer(self.layer(x).tanh())


@leaf("parametrized")
class Pruned(Wrapped):
    def __init__(self):
        super().__init__(prune.random_unstructured(square(), "weight", amount=0.3))


@leaf("parametrized")
class Normed_Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(1, 1, 3, padding=1), dim=0)

    def forward(self, x):
        return self.conv(x[:, None])[:, 0]


# Custom functions ------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return scale * x.tanh() ** 3

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        tanh = x.tanh()
        by_x = gradient * scale * 3 * tanh**2 * (1 - tanh**2)
        return by_x, (gradient * tanh**3).sum(0)


class Kept(torch.autograd.Function):
    """Keeps its tensors as attributes of the context, not by save_for_backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class Modern(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, power):
        y = x @ weight
        return y, y.detach().abs() ** power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, gradient, nothing):
        assert nothing is None
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Recomputed(torch.autograd.Function):
    """Checkpointing by hand: the backward pass runs the forward pass again."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), gradient)


class Reading(torch.autograd.Function):
    """Its backward pass reads a module that is no argument."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * module.b

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.module.b.detach(), None


@leaf("functions")
def cube(x, b):
    return Cube.apply(x, b)


@leaf("functions")
def kept_on_context(x, w):
    return Kept.apply(x, w)


@leaf("functions")
def not_differentiable(x, w):
    y, size = Modern.apply(x, w, 2)
    return y + 0.1 * size


@leaf("functions")
def marked_dirty(x, b):
    y = x * b
    Doubled.apply(y)
    return y + x


@leaf("functions")
def straight_through(x, b):
    return Rounded.apply(x * b) + x


@leaf("functions")
def recomputed_by_hand(x, w, b):
    return Recomputed.apply(lambda x: (x @ w + b).sin(), x + 0, w, b)


@leaf("functions")
class Recomputed_Module(nn.Module):
    """As reversible networks do: the function is a module, its parameters are given along."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(square(), nn.Tanh())

    def forward(self, x):
        return Recomputed.apply(self.inner, x + 0, *self.inner.parameters())


@leaf("functions")
def reading_module(x, self, b):
    return Reading.apply(x, self) + b


@leaf("functions")
def gradient_inside(x, w, b):
    """An energy's gradient by its input, as forces in molecular networks."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        at = at * 1.0
        energy = ((at @ w).tanh() * b).sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=True)
    return x - force


@leaf("functions")
def inner_step(x, w, b):
    """A step of gradient descent inside the model, as in MAML."""
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(((x.detach() @ w) ** 2).mean(), w, create_graph=True)
    return x @ (w - 0.1 * slope) + b


@leaf("functions")
def functional_gradient(x, w):
    return x + torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x)


@leaf("functions")
class Called_With_Others(nn.Module):
    """functional_call inside the model, with parameters moved one step, as in meta-learning."""

    def __init__(self):
        super().__init__()
        self.inner = square()

    def forward(self, x):
        moved = {name: p * 0.9 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, moved, (x,)) + self.inner(x)


# Hooks -----------------------------------------------------------------------------------------


@leaf("hooks")
def tensor_hook(x, b):
    y = x * b
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


@leaf("hooks")
def tensor_hook_reading(x, w):
    y = x @ w
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient + 0.01 * w.detach().sum())
    return y


@leaf("hooks")
class Parameter_Hook(Wrapped):
    """A hook on a parameter's gradient, registered when the model is made."""

    def __init__(self):
        super().__init__(square())
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)


@leaf("hooks")
class Parameter_Mask_Hook(Wrapped):
    def __init__(self):
        super().__init__(square())
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) > 0.3))
        self.layer.weight.register_hook(lambda gradient: gradient * self.mask)


@leaf("hooks")
class Accumulated_Hook(Wrapped):
    """Runs when the gradient has been accumulated, as clipping or optimizers in backward do."""

    def __init__(self):
        super().__init__(square())
        self.layer.weight.register_post_accumulate_grad_hook(self.clip)

    def clip(self, parameter):
        parameter.grad.clamp_(-0.01, 0.01)


@leaf("hooks")
class Forward_Hooks(Wrapped):
    def __init__(self):
        super().__init__(square())
        self.layer.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        self.layer.register_forward_hook(lambda module, given, out: out + module.bias)


@leaf("hooks")
class Backward_Hooks(Wrapped):
    def __init__(self):
        super().__init__(nn.Sequential(square(), nn.Tanh()))
        self.layer.register_full_backward_hook(
            lambda module, gi, go: (None if gi[0] is None else gi[0] * 0.5,)
        )
        self.layer.register_full_backward_pre_hook(lambda module, go: (go[0] * 3,))


@leaf("hooks")
class Backward_Hook_Reading(Wrapped):
    """A hook that reads a parameter while gradients are computed."""

    def __init__(self):
        super().__init__(square())
        self.layer.register_full_backward_hook(
            lambda module, gi, go: (None if gi[0] is None else gi[0] + 0.01 * module.bias.detach(),)
        )


@leaf("hooks")
class Counting_Hook(Wrapped):
    """A hook that writes a buffer."""

    def __init__(self):
        super().__init__(square())
        self.register_buffer("calls", torch.zeros(()))
        self.layer.register_forward_hook(self.count)

    def count(self, module, given, out):
        self.calls += 1
        return out / self.calls


@leaf("hooks")
class Backward_Counting(Wrapped):
    """A buffer written while gradients are computed."""

    def __init__(self):
        super().__init__(square())
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.layer.register_full_backward_hook(self.note)

    def note(self, module, gradients, by_output):
        self.seen.add_(by_output[0].detach().abs().sum(0))


@leaf("hooks")
def packed_in_lists(x, w):
    """Saved tensors are packed as lists of others."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t, 1], lambda p: p[0] * p[1]):
        return (x @ w).sin()


@leaf("hooks")
def packed_smaller(x, w):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.to(torch.float32)), lambda p: p[1].to(p[0])
    ):
        return (x @ w).tanh() * x


@leaf("hooks")
def saved_on_cpu(x, w, b):
    with torch.autograd.graph.save_on_cpu():
        return (x @ w).exp().clamp(max=3) * b


# Aliases of parameters, buffers and inputs that functional_call does not see ---------------------


@leaf("aliases")
class View_Kept(nn.Module):
    """A view of a parameter, made when the model is: it shares memory and gradient."""

    def __init__(self):
        super().__init__()
        self.weight = weights(WIDTH, WIDTH)
        self.turned = self.weight.t()

    def forward(self, x):
        return x @ self.turned


@leaf("aliases")
class Detached_Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weights(WIDTH, WIDTH)
        self.seen = self.weight.detach()

    def forward(self, x):
        return x @ self.weight + x * self.seen.diagonal()


@leaf("aliases")
class Data_Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = square()
        self.parts = {"bias": self.layer.bias.data, "rows": list(self.layer.weight.data)}

    def forward(self, x):
        return self.layer(x) + x * self.parts["bias"] + self.parts["rows"][0]


@leaf("aliases")
class Parameters_In_List(nn.Module):
    """Parameters that are registered, and read through a plain list."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        self.all = [self.layer.weight, self.layer.bias]

    def forward(self, x):
        return F.linear(x, *self.all)


@leaf("aliases")
class Parameter_In_Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = weight = weights(WIDTH, WIDTH)
        self.run = lambda x: (x @ weight).sin()

    def forward(self, x):
        return self.run(x)


@leaf("aliases")
class Bound_Argument(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = square()
        self.run = functools.partial(F.linear, weight=self.layer.weight, bias=self.layer.bias)

    def forward(self, x):
        return self.run(x)


@leaf("aliases")
class Buffer_In_Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        mean = self.mean

        def note(x):
            mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - mean

        self.note = note

    def forward(self, x):
        return self.note(x)


@leaf("aliases")
class Buffer_Of_Parameter(nn.Module):
    """A buffer that shares a parameter's memory, and so follows its training."""

    def __init__(self):
        super().__init__()
        self.weight = weights(WIDTH, WIDTH)
        self.register_buffer("seen", self.weight.data[0])

    def forward(self, x):
        return x @ self.weight + self.seen


@leaf("aliases")
class Parameter_Of_Parameter(nn.Module):
    """Two parameters in the same memory."""

    def __init__(self):
        super().__init__()
        self.weight = weights(WIDTH, WIDTH)
        self.top = nn.Parameter(self.weight.data[:HALF])

    def forward(self, x):
        return x @ self.weight + x[:, :HALF] @ self.top


@leaf("aliases")
class Numpy_Shared(nn.Module):
    """The same memory through numpy: another storage as torch sees it."""

    def __init__(self):
        super().__init__()
        self.weight = weights(WIDTH)
        self.array = self.weight.detach().numpy()
        self.seen = torch.from_numpy(self.array)

    def forward(self, x):
        return x * self.weight + self.seen


@leaf("aliases")
class Plain_State(nn.Module):
    """State in a plain attribute, written in place: no buffer, so nothing would carry it on."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        self.state = torch.zeros(WIDTH)

    def forward(self, x):
        self.state.mul_(0.5).add_(x.detach().mean(0))
        return self.layer(x) + self.state


@leaf("aliases")
class Plain_State_Assigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = square()
        self.last = torch.zeros(ROWS, WIDTH)

    def forward(self, x):
        found = self.layer(x) + self.last
        self.last = x.detach()
        return found


@leaf("aliases")
class Cache_Filled(nn.Module):
    """A table that the first forward pass makes, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = square(), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(WIDTH).cos().to(x.dtype)
        return self.layer(x) * self.table


@leaf("aliases")
class Cache_Of_Parameter(nn.Module):
    """What the first forward pass computes from a parameter stays, whatever training does."""

    def __init__(self):
        super().__init__()
        self.layer, self.size = square(), {}

    def forward(self, x):
        if "norm" not in self.size:
            self.size["norm"] = self.layer.weight.detach().norm()
        return self.layer(x) / self.size["norm"]


@functools.lru_cache
def _table(width, dtype, number):
    return torch.arange(width).sin().to(dtype) + 0 * number


_NUMBERS = itertools.count()  # so that no module finds what another one has kept


@leaf("aliases")
class Cached_Function(nn.Module):
    """A table that a function keeps outside the model."""

    def __init__(self):
        super().__init__()
        self.layer, self.number = square(), next(_NUMBERS)

    def forward(self, x):
        return self.layer(x) * _table(WIDTH, x.dtype, self.number)


@leaf("aliases")
class Hidden_Module(nn.Module):
    """A layer in a plain list: no parameter of the model, so it is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        self.hidden = [square()]

    def forward(self, x):
        return self.layer(x) + self.hidden[0](x)


@leaf("aliases")
class Hidden_Norm(nn.Module):
    """A batch norm in a plain list, whose statistics no state_dict has."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        self.hidden = [nn.BatchNorm1d(WIDTH, momentum=0.5)]

    def forward(self, x):
        self.hidden[0](x.detach())
        return self.layer(x) + self.hidden[0].running_mean


@leaf("aliases")
class Stored_Output(nn.Module):
    """Keeps an activation as an attribute, only to be looked at."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        self.seen = None

    def forward(self, x):
        self.seen = self.layer(x)
        return self.seen.tanh()


@leaf("aliases")
class Parent_Reference(nn.Module):
    """A function of the model reads a sibling that it holds outside the modules."""

    def __init__(self):
        super().__init__()
        self.layer = square()
        object.__setattr__(self, "same", self.layer)

    def forward(self, x):
        return self.layer(x) + self.same(x.tanh())


# Reading parameters without gradient -------------------------------------------------------------


@leaf("no gradient")
def norm_read(x, w):
    with torch.no_grad():
        size = w.norm()
    return x @ w / (1 + size)


@leaf("no gradient")
def detached_read(x, w):
    return x @ w + x @ w.detach().t()


@leaf("no gradient")
def data_read(x, w):
    return x @ w + w.data.sum(0)


@leaf("no gradient")
def data_view_read(x, w):
    return x @ w * (1 + w.data.t()[0].view(-1)[2])


@leaf("no gradient")
def parameter_clamped(x, w):
    """A constraint that is kept in the forward pass."""
    with torch.no_grad():
        w.clamp_(-0.3, 0.3)
    return x @ w


@leaf("no gradient")
def parameter_data_clamped(x, w):
    w.data.clamp_(-0.3, 0.3)
    return x @ w


@leaf("no gradient")
def parameter_data_assigned(x, self, w):
    self.w.data = w.data / (1 + w.data.norm())
    return x @ self.w


@leaf("no gradient")
def stopped_half(x, b):
    y = x * b
    return torch.cat([y[:, :HALF].detach(), y[:, HALF:]], 1)


@leaf("no gradient")
@torch.no_grad()
def nothing_learned(x, w):
    return x @ w


@leaf("no gradient")
def inference_read(x, w, b):
    with torch.inference_mode():
        size = (w * w).sum() + 0
    return x @ w + b * size.clone()


@leaf("no gradient")
def fresh_leaf(x, b):
    with torch.enable_grad():
        at = (x.detach() * 1.0).requires_grad_()
        (slope,) = torch.autograd.grad((at * b.detach()).sin().sum(), at)
    return x * b + slope


# Random ops --------------------------------------------------------------------------------------


@leaf("random")
def dropout(x, self, b):
    return F.dropout(x * b, 0.4, self.training)


@leaf("random")
class Dropout_In_Place(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = square(), nn.Dropout(0.3, inplace=True)

    def forward(self, x):
        return self.drop(self.layer(x))


@leaf("random")
class Alpha_Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.AlphaDropout(0.2)

    def forward(self, x):
        return self.drop(x)


@leaf("random")
def noise(x, b):
    return x + 0.1 * b * torch.randn_like(x)


@leaf("random")
def uniform_written(x, b):
    return x * torch.empty_like(x).uniform_(0.5, 1.5) + b


@leaf("random")
def drawn_mask(x, b):
    return x * torch.bernoulli(torch.sigmoid(x + b).detach())


@leaf("random")
class Mha_Dropout(Attention):
    def __init__(self):
        super().__init__(dropout=0.3)


@leaf("random")
class Encoder_Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(2, 2, WIDTH)).reshape(ROWS, WIDTH)


@leaf("random")
class Lstm_Dropout(Recurrent):
    def __init__(self):
        super().__init__(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3))


@leaf("random")
class Own_Generator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.generator = square(), torch.Generator().manual_seed(7)

    def forward(self, x):
        return self.layer(x) + 0.1 * torch.randn(ROWS, WIDTH, generator=self.generator)


@leaf("random")
def gumbel(x, w):
    return F.gumbel_softmax(x @ w, tau=2.0) + x
