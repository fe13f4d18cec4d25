"""Transformers in plain PyTorch, for measuring a training step: decoders of language, ViT, and the
diffusion transformers DiT and Flux.

A Shape describes a model. One Block with its stages computes the decoders and ViT: where the norms
are, which norm it is, what attention does with q and k, and which feed-forward network follows.

The norms of diffusion transformers have no weight. What a projection makes of a sample's
conditioning scales and shifts their output, and gates what a part adds: adaLN-Zero of Peebles and
Xie, "Scalable Diffusion Models with Transformers" (2023), with the operations of diffusers. Its
zeros are random weights here, with which every gradient has a value.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shapes import PIXELS, Shape

INITIAL_DEVIATION = 0.02
TEXT_FEATURES = 4096


def norm_of(shape: Shape, **factory) -> nn.Module:
    """A norm of the residual stream. What is adaptive has no weight of its own."""
    kind = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[shape.norm]
    return kind(shape.hidden, shape.eps, elementwise_affine=not shape.adaptive, **factory)


class Attention(nn.Module):
    """Attention, rotated if it gets cos and sin. ``heads`` queries share ``kv_heads`` keys.

    Its forward and those of its subclasses are written as in Hugging Face's models, whose
    statements tilenorm.patch reads.
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.shape = shape
        linear: Callable = partial(nn.Linear, bias=shape.biased, **factory)
        columns = shape.hidden, shape.narrow, shape.narrow
        self.q, self.k, self.v = (linear(shape.hidden, count) for count in columns)
        self.output = linear(shape.hidden, shape.hidden)
        if shape.qk_norm:
            whole = shape.qk_norm == "whole"
            columns = (shape.hidden, shape.narrow) if whole else (shape.head, shape.head)
            norms = (nn.RMSNorm(count, shape.eps, **factory) for count in columns)
            self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        heads = *x.shape[:-1], -1, self.shape.head
        q = self.q(x).view(heads).transpose(1, 2)
        k = self.k(x).view(heads).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        if cos is not None:
            q, k = rotated(q, k, cos, sin)
        return self.output(attended(self.shape, q, k, v))


class QwenAttention(Attention):
    """Attention of Qwen 3, which normalises each head."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        heads = *x.shape[:-1], -1, self.shape.head
        q = self.q_norm(self.q(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(heads)).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        q, k = rotated(q, k, cos, sin)
        return self.output(attended(self.shape, q, k, v))


class OLMoAttention(Attention):
    """Attention of OLMo 2, which normalises all heads of a token together."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        heads = *x.shape[:-1], -1, self.shape.head
        q = self.q_norm(self.q(x))
        k = self.k_norm(self.k(x))
        v = self.v(x)
        q = q.view(heads).transpose(1, 2)
        k = k.view(heads).transpose(1, 2)
        v = v.view(heads).transpose(1, 2)
        q, k = rotated(q, k, cos, sin)
        return self.output(attended(self.shape, q, k, v))


class AdaptiveAttention(Attention):
    """Attention of diffusion transformers, whose layers may put streams together in between."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, of shape (batch, heads, tokens, D)."""
        # (batch, tokens, H D) -> (batch, tokens, H, D)
        projected = self.q(x), self.k(x), self.v(x)
        q, k, v = (columns.unflatten(-1, (-1, self.shape.head)) for columns in projected)
        if self.shape.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
        """Attention before its output's projection, rotated in float32 if it gets cos and sin."""
        if table:
            q, k = _rotated_pairs(q, *table), _rotated_pairs(k, *table)
        return attended(self.shape, q, k, v)


ATTENTION = {"": Attention, "head": QwenAttention, "whole": OLMoAttention}


def attended(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, heads, tokens, D) -> (batch, tokens, H D)"""
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped)
    return y.transpose(1, 2).flatten(-2)


class FeedForward(nn.Module):
    """output(silu(gate(x)) · up(x)), or output(gelu(up(x)))"""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        linear: Callable = partial(nn.Linear, bias=shape.biased, **factory)
        self.approximate = "tanh" if shape.adaptive else "none"
        self.gate = linear(shape.hidden, shape.ffn) if shape.gated else None
        self.up = linear(shape.hidden, shape.ffn)
        self.output = linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.output(F.gelu(self.up(x), approximate=self.approximate))
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer: x + attention(norm(x)), and then x + ffn(norm(x)).

    With the norms after the parts: x + norm(attention(x)), and then x + norm(ffn(x)); after the
    sums: norm(x + attention(x)), and then norm(x + ffn(x)).
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.shape = shape
        self.attention_norm = norm_of(shape, **factory)
        self.attention = ATTENTION[shape.qk_norm](shape, **factory)
        self.ffn_norm = norm_of(shape, **factory)
        self.ffn = FeedForward(shape, **factory)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        if self.shape.norm_after == "sum":
            x = self.attention_norm(x + self.attention(x, cos, sin))
            return self.ffn_norm(x + self.ffn(x))
        if self.shape.norm_after == "part":
            x = x + self.attention_norm(self.attention(x, cos, sin))
            return x + self.ffn_norm(self.ffn(x))
        x = x + self.attention(self.attention_norm(x), cos, sin)
        normed = self.ffn_norm(x)  # a statement of its own, which tilenorm.patch finds
        return x + self.ffn(normed)


class Head(nn.Module):
    """The last norm, the logits, and the cross entropy of the logits in float32.

    The logits of an image are those of its class token.
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.images = shape.images
        self.norm = norm_of(shape, **factory)
        biased = shape.biased and not shape.tied
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=biased, **factory)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(x)
        if self.images:
            x = x[:, :1]
        logits = self.output(x).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Transformer(nn.Module):
    """tokens (batch, T + 1) -> the scalar loss of predicting each token from the tokens before it.

    With ``images``: patches (batch, T - 1, PIXELS) and classes (batch,) -> the scalar loss. The
    projected patches stand behind a class token.
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.shape = shape
        if shape.images:
            self.embedding = nn.Linear(PIXELS, shape.hidden, **factory)
            self.first = nn.Parameter(torch.empty(1, 1, shape.hidden, **factory))
        else:
            self.embedding = nn.Embedding(shape.vocab, shape.hidden, **factory)
        self.blocks = nn.ModuleList(Block(shape, **factory) for _ in range(shape.layers))
        self.head = Head(shape, **factory)
        if shape.tied:
            self.head.output.weight = self.embedding.weight
        if shape.learned:
            self.positions = nn.Parameter(torch.empty(shape.learned, shape.hidden, **factory))
        for name, table in zip(("cos", "sin"), rotation(shape), strict=True):
            placed = None if shape.learned else table[None].to(**factory)
            self.register_buffer(name, placed, persistent=False)

    def forward(self, given: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            given, targets = given[:, :-1], given[:, 1:]
        x = self.embedding(given)
        if self.shape.images:
            x = torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        if self.shape.learned:
            x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, targets)

    def drawn(self, seed: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random inputs, the same for each step and variant."""
        shape, make = self.shape, torch.Generator(device).manual_seed(seed)
        whole: Callable = partial(torch.randint, shape.vocab, generator=make, device=device)
        if not shape.images:
            return (whole((shape.batch, shape.length + 1)),)
        size = shape.batch, shape.length - 1, PIXELS
        patches = torch.randn(size, generator=make, device=device, dtype=dtype)
        return patches, whole((shape.batch,))


def modulation(shape: Shape, count: int, **factory) -> nn.Module:
    """conditioning (B, D) -> (B, count · D), which is cut into what modulates a layer."""
    return nn.Sequential(nn.SiLU(), nn.Linear(shape.hidden, count * shape.hidden, **factory))


class Modulated(nn.Module):
    """A norm that scales and shifts its output. It also returns the other parts of ``count`` that a
    projection makes of the conditioning: AdaLayerNormZero of diffusers.
    """

    def __init__(self, shape: Shape, count: int, **factory):
        super().__init__()
        self.count = count
        self.modulation = modulation(shape, count, **factory)
        self.norm = norm_of(shape, **factory)

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        shift, scale, *others = self.modulation(c).chunk(self.count, 1)
        x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x, *others


class Stream(nn.Module):
    """The parts of a layer around its attention, which several streams may share.

    The statements are those of diffusers' blocks, which tilenorm.patch reads.
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.attention_norm = Modulated(shape, 6, **factory)
        self.attention = AdaptiveAttention(shape, **factory)
        self.ffn_norm = norm_of(shape, **factory)
        self.ffn = FeedForward(shape, **factory)

    def forward(self, x: Tensor, y: Tensor, gate, shift, scale, gate_ffn) -> Tensor:
        """The layer's output, given its input x and y of its attention."""
        y = gate[:, None] * self.attention.output(y)
        x = x + y
        normed = self.ffn_norm(x)
        normed = normed * (1 + scale[:, None]) + shift[:, None]
        return x + gate_ffn[:, None] * self.ffn(normed)


class Alone(nn.Module):
    """A layer of DiT."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.stream = Stream(shape, **factory)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        normed, *by_sample = self.stream.attention_norm(x, c)
        attention = self.stream.attention
        return self.stream(x, attention.mixed(*attention.heads(normed)), *by_sample)


class Joint(nn.Module):
    """A layer of Flux in which a stream of text and one of an image attend to each other."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.text, self.image = Stream(shape, **factory), Stream(shape, **factory)

    def forward(self, text: Tensor, image: Tensor, c: Tensor, cos: Tensor, sin: Tensor):
        of_text, *for_text = self.text.attention_norm(text, c)
        of_image, *for_image = self.image.attention_norm(image, c)
        both = self.text.attention.heads(of_text), self.image.attention.heads(of_image)
        q, k, v = (torch.cat(parts, 2) for parts in zip(*both, strict=True))
        y = self.image.attention.mixed(q, k, v, cos, sin)
        written, seen = y.split((text.shape[1], image.shape[1]), 1)
        image = self.image(image, seen, *for_image)
        return self.text(text, written, *for_text), image


class Single(nn.Module):
    """A layer of Flux with attention beside its feed-forward network."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.norm = Modulated(shape, 3, **factory)
        self.attention = AdaptiveAttention(shape, **factory)
        self.attention.output = nn.Identity()
        self.up = nn.Linear(shape.hidden, shape.ffn, **factory)
        self.output = nn.Linear(shape.hidden + shape.ffn, shape.hidden, **factory)

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed, gate = self.norm(x, c)
        y = self.attention.mixed(*self.attention.heads(normed), cos, sin)
        wide = F.gelu(self.up(normed), approximate="tanh")
        return x + gate[:, None] * self.output(torch.cat((y, wide), 2))


class AdaptiveHead(Head):
    """The last norm, and the mean square of the error of a sample's prediction in float32."""

    def __init__(self, shape: Shape, **factory):
        super().__init__(shape, **factory)
        self.modulation = modulation(shape, 2, **factory)

    def forward(self, x: Tensor, c: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        shift, scale = self.modulation(c).chunk(2, 1)
        predicted = self.output(self.norm(x) * (1 + scale[:, None]) + shift[:, None])
        return F.mse_loss(predicted.float(), target.float())


class Diffusion(nn.Module):
    """x (B, S, channels), features (B, conditioning) and a target (B, S, vocab) -> the scalar loss.

    The features stand for those of a time and of a text or a class. text, which Flux alone takes,
    is (B, T, TEXT_FEATURES). Flux has twice as many single layers as joint ones.
    """

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Linear(shape.channels, shape.hidden, **factory)
        self.conditioning = nn.Sequential(
            nn.Linear(shape.conditioning, shape.hidden, **factory),
            nn.SiLU(),
            nn.Linear(shape.hidden, shape.hidden, **factory),
        )
        layers = [Alone] if shape.adaptive == "dit" else [Joint, Single, Single]
        kinds = sorted(layers * shape.layers, key=layers.index)
        self.blocks = nn.ModuleList(kind(shape, **factory) for kind in kinds)
        self.head = AdaptiveHead(shape, **factory)
        if shape.adaptive == "flux":
            self.text = nn.Linear(TEXT_FEATURES, shape.hidden, **factory)
        for name, table in zip(("cos", "sin"), rotation(shape), strict=True):
            self.register_buffer(name, table.to(factory["device"], torch.float32), persistent=False)

    def forward(self, x: Tensor, features: Tensor, target: Tensor, *text: Tensor) -> Tensor:
        x, c = self.embedding(x), self.conditioning(features)
        if not text:
            for block in self.blocks:
                x = block(x, c)
            return self.head(x, c, target)
        (written,) = map(self.text, text)
        for block in self.blocks[: self.shape.layers]:
            written, x = block(written, x, c, self.cos, self.sin)
        x, before = torch.cat((written, x), 1), written.shape[1]
        for block in self.blocks[self.shape.layers :]:
            x = block(x, c, self.cos, self.sin)
        return self.head(x[:, before:], c, target)

    def drawn(self, seed: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random inputs, the same for each step and variant. A ninth of Flux's tokens are text."""
        shape, make = self.shape, torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=make, device=device, dtype=dtype)
        text = max(1, shape.length // 9) if shape.adaptive == "flux" else 0
        tokens = shape.batch, shape.length - text
        given = normal(*tokens, shape.channels), normal(shape.batch, shape.conditioning)
        given = *given, normal(*tokens, shape.vocab)
        return (*given, normal(shape.batch, text, TEXT_FEATURES)) if text else given


@torch.no_grad()
def reset(model: nn.Module, seed: int) -> None:
    """Set norms to 1, biases to 0, and all other weights to random values from the seed."""
    make = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, INITIAL_DEVIATION, generator=make)


def rotation(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, each of shape (length, head): two equal halves, or pairs
    of equals in a diffusion transformer.
    """
    frequencies = shape.theta ** -(torch.arange(0, shape.head, 2).double() / shape.head)
    angles = torch.arange(shape.length).double()[:, None] * frequencies
    angles = angles.repeat_interleave(2, -1) if shape.adaptive else torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k of shape (batch, heads, tokens, D), rotated by tables (1, tokens, D): Hugging Face's
    apply_rotary_pos_emb, whose operations tilenorm.compile recognises in the graph.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of neighbours rotated, in float32 as Flux does."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    partner = torch.stack((-second, first), -1).flatten(-2)
    return (x.float() * cos + partner.float() * sin).to(x.dtype)
