"""A transformer with the structure of Llama 3 in plain PyTorch, for measuring a training step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROPE_THETA = 500_000.0
EPS = 1e-5
INITIAL_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes of the model. The defaults are those of Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        projections = 2 * self.hidden + 2 * self.kv_heads * self.head  # q, output; k, v
        return self.hidden * (projections + 3 * self.ffn + 2)

    @property
    def other_parameters(self) -> int:
        return self.hidden * (2 * self.vocab + 1)

    @property
    def layer_activations(self) -> int:
        """The elements that eager PyTorch saves for the backward, for each token and layer.

        These are the inputs of every norm, projection and product, and attention's q, k and v.
        """
        return 7 * self.hidden + 2 * self.kv_heads * self.head + 4 * self.ffn


class Attention(nn.Module):
    """Causal attention with rotary positions. ``heads`` queries share ``kv_heads`` keys."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.shape = shape
        narrow = shape.kv_heads * shape.head
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False, **factory)
        self.k = nn.Linear(shape.hidden, narrow, bias=False, **factory)
        self.v = nn.Linear(shape.hidden, narrow, bias=False, **factory)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:  # (batch, tokens, H D) -> (batch, H, tokens, D)
            return projected.unflatten(-1, (-1, self.shape.head)).transpose(1, 2)

        q, k, v = (heads(projection(x)) for projection in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """output(silu(gate(x)) · up(x))"""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False, **factory)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False, **factory)
        self.output = nn.Linear(shape.ffn, shape.hidden, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer: x + attention(norm(x)), and then x + ffn(norm(x))."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, EPS, **factory)
        self.attention = Attention(shape, **factory)
        self.ffn_norm = nn.RMSNorm(shape.hidden, EPS, **factory)
        self.ffn = FeedForward(shape, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Head(nn.Module):
    """The last norm, the logits, and the cross entropy of the logits in float32."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, EPS, **factory)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False, **factory)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Llama(nn.Module):
    """tokens (batch, T + 1) -> the scalar loss of predicting each token from the tokens before it.

    With ``checkpointing``, a layer saves only its input, and the backward recomputes the layer.
    """

    def __init__(self, shape: Shape, length: int, checkpointing: bool, **factory):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(shape.vocab, shape.hidden, **factory)
        self.blocks = nn.ModuleList(Block(shape, **factory) for _ in range(shape.layers))
        self.head = Head(shape, **factory)
        for name, table in zip(("cos", "sin"), _rotation(shape, length), strict=True):
            self.register_buffer(name, table.to(**factory), persistent=False)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Set the weights of norms to 1, and all other weights to random values from the seed."""
        make = torch.Generator(self.cos.device).manual_seed(seed)
        for parameter in self.parameters():
            cut = hasattr(parameter, "placements")  # a DTensor: every rank draws the whole weight
            like = {"dtype": parameter.dtype, "device": make.device}
            whole = torch.empty(parameter.shape, **like) if cut else parameter
            if parameter.ndim == 1:
                whole.fill_(1.0)
            else:
                whole.normal_(0.0, INITIAL_DEVIATION, generator=make)
            if cut:
                from torch.distributed.tensor import distribute_tensor

                where = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(whole, *where, src_data_rank=None))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.head(x, tokens[:, 1:])


def _rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, each of shape (length, head) with two equal halves."""
    frequencies = ROPE_THETA ** -(torch.arange(0, shape.head, 2).double() / shape.head)
    angles = torch.arange(length).double()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
