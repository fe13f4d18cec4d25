"""Diffusion transformers in plain PyTorch, for measuring a training step: DiT, and Flux's blocks.

Norms have no weight. What a projection makes of a sample's conditioning scales and shifts their
output, and gates what a part adds: adaLN-Zero of Peebles and Xie, "Scalable Diffusion Models with
Transformers" (2023), with the operations of diffusers. Its zeros are random weights here, with
which every gradient has a value.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import Attention, FeedForward, attended, norm_of, rotation
from bench.shapes import Shape

TEXT_FEATURES = 4096


class Modulation(nn.Module):
    """conditioning (B, D) -> tensors (B, D): chunks of one projection."""

    def __init__(self, shape: Shape, count: int, **factory):
        super().__init__()
        self.count = count
        self.linear = nn.Linear(shape.hidden, count * shape.hidden, **factory)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(c)).chunk(self.count, dim=1)


class Stream(nn.Module):
    """The parts of a layer around its attention, which several streams may share."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        norm = partial(norm_of, shape, shape.hidden, elementwise_affine=False, **factory)
        self.modulation = Modulation(shape, 6, **factory)
        self.attention_norm = norm()
        self.attention = Attention(shape, **factory)
        self.ffn_norm = norm()
        self.ffn = FeedForward(shape, **factory)

    def opened(self, x: Tensor, by_sample: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k and v."""
        shift, scale, *_ = by_sample
        normed = self.attention_norm(x) * (1 + scale[:, None]) + shift[:, None]
        return self.attention.heads(normed)

    def closed(self, x: Tensor, y: Tensor, by_sample: tuple[Tensor, ...]) -> Tensor:
        """The layer's output, given that of attention."""
        *_, gate, shift, scale, gate_ffn = by_sample
        x = x + gate[:, None] * self.attention.output(y)
        normed = self.ffn_norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate_ffn[:, None] * self.ffn(normed)


class Alone(Stream):
    """A layer of DiT."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        by_sample = self.modulation(c)
        q, k, v = self.opened(x, by_sample)
        y = attended(q, k, v, causal=False)
        return self.closed(x, y, by_sample)


class Joint(nn.Module):
    """A layer of Flux in which a stream of text and one of an image attend to each other."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.text, self.image = Stream(shape, **factory), Stream(shape, **factory)

    def forward(self, text: Tensor, image: Tensor, c: Tensor, cos: Tensor, sin: Tensor):
        for_text, for_image = self.text.modulation(c), self.image.modulation(c)
        both = self.text.opened(text, for_text), self.image.opened(image, for_image)
        q, k, v = (torch.cat(parts, 2) for parts in zip(*both, strict=True))
        y = attended(rotated_pairs(q, cos, sin), rotated_pairs(k, cos, sin), v, causal=False)
        y_text, y_image = y.split((text.shape[1], image.shape[1]), 1)
        return self.text.closed(text, y_text, for_text), self.image.closed(
            image, y_image, for_image
        )


class Single(nn.Module):
    """A layer of Flux with attention beside its feed-forward network."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.modulation = Modulation(shape, 3, **factory)
        self.norm = norm_of(shape, shape.hidden, elementwise_affine=False, **factory)
        self.attention = Attention(shape, **factory)
        self.attention.output = nn.Identity()
        self.up = nn.Linear(shape.hidden, shape.ffn, **factory)
        self.output = nn.Linear(shape.hidden + shape.ffn, shape.hidden, **factory)

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)
        normed = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        q, k, v = self.attention.heads(normed)
        y = attended(rotated_pairs(q, cos, sin), rotated_pairs(k, cos, sin), v, causal=False)
        wide = F.gelu(self.up(normed), approximate="tanh")
        return x + gate[:, None] * self.output(torch.cat((y, wide), 2))


class Head(nn.Module):
    """The last norm, and the mean square of the error of a sample's prediction in float32."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.modulation = Modulation(shape, 2, **factory)
        self.norm = norm_of(shape, shape.hidden, elementwise_affine=False, **factory)
        self.output = nn.Linear(shape.hidden, shape.vocab, **factory)

    def forward(self, x: Tensor, c: Tensor, target: Tensor) -> Tensor:
        shift, scale = self.modulation(c)
        predicted = self.output(self.norm(x) * (1 + scale[:, None]) + shift[:, None])
        return F.mse_loss(predicted.float(), target.float())


class Diffusion(nn.Module):
    """x (B, S, channels), features (B, conditioning) and a target (B, S, vocab) -> the scalar loss.

    The features stand for those of a time and of a text or a class. text, which Flux alone takes,
    is (B, T, TEXT_FEATURES). Flux has twice as many single layers as joint ones.
    """

    def __init__(self, shape: Shape, length: int, **factory):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Linear(shape.channels, shape.hidden, **factory)
        self.conditioning = nn.Sequential(
            nn.Linear(shape.conditioning, shape.hidden, **factory),
            nn.SiLU(),
            nn.Linear(shape.hidden, shape.hidden, **factory),
        )
        self.blocks = nn.ModuleList(self._blocks(**factory))
        self.head = Head(shape, **factory)
        if shape.adaptive == "flux":
            self.text = nn.Linear(TEXT_FEATURES, shape.hidden, **factory)
        for name, table in zip(("cos", "sin"), rotation(shape, length), strict=True):
            pairs = table[:, : shape.head // 2].repeat_interleave(2, -1)
            placed = pairs.to(factory["device"], torch.float32)
            self.register_buffer(name, placed, persistent=False)

    def _blocks(self, **factory) -> list[nn.Module]:
        layers = self.shape.layers
        if self.shape.adaptive == "dit":
            return [Alone(self.shape, **factory) for _ in range(layers)]
        joint = [Joint(self.shape, **factory) for _ in range(layers)]
        return joint + [Single(self.shape, **factory) for _ in range(2 * layers)]

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


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of neighbours rotated, in float32 as Flux does."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    partner = torch.stack((-second, first), -1).flatten(-2)
    return (x.float() * cos + partner.float() * sin).to(x.dtype)


def drawn_batch(
    shape: Shape, batch: int, length: int, seed: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Random inputs of a step, the same for each variant. A ninth of Flux's tokens are text."""
    make = torch.Generator(device).manual_seed(seed)
    drawn = partial(torch.randn, generator=make, device=device, dtype=dtype)
    text = max(1, length // 9) if shape.adaptive == "flux" else 0
    tokens = batch, length - text
    given = drawn(*tokens, shape.channels), drawn(batch, shape.conditioning)
    given = *given, drawn(*tokens, shape.vocab)
    return (*given, drawn(batch, text, TEXT_FEATURES)) if text else given
