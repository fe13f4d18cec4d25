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

from bench import models
from bench.models import Attention, attended, norm_of, rotation
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


class Stream(models.Block):
    """The parts of a layer around its attention, which several streams may share."""

    def __init__(self, shape: Shape, **factory):
        super().__init__(shape, **factory)
        self.modulation = Modulation(shape, 6, **factory)

    def opened(self, x: Tensor, by_sample: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
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

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # type: ignore[override]
        by_sample = self.modulation(c)
        y = attended(self.shape, *self.opened(x, by_sample))
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
        y = attended(self.text.shape, q, k, v, cos, sin)
        written, seen = y.split((text.shape[1], image.shape[1]), 1)
        image = self.image.closed(image, seen, for_image)
        return self.text.closed(text, written, for_text), image


class Single(nn.Module):
    """A layer of Flux with attention beside its feed-forward network."""

    def __init__(self, shape: Shape, **factory):
        super().__init__()
        self.modulation = Modulation(shape, 3, **factory)
        self.norm = norm_of(shape, **factory)
        self.attention = Attention(shape, **factory)
        self.attention.output = nn.Identity()
        self.up = nn.Linear(shape.hidden, shape.ffn, **factory)
        self.output = nn.Linear(shape.hidden + shape.ffn, shape.hidden, **factory)

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)
        normed = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        y = self.attention(normed, cos, sin)
        wide = F.gelu(self.up(normed), approximate="tanh")
        return x + gate[:, None] * self.output(torch.cat((y, wide), 2))


class Head(models.Head):
    """The last norm, and the mean square of the error of a sample's prediction in float32."""

    def __init__(self, shape: Shape, **factory):
        super().__init__(shape, **factory)
        self.modulation = Modulation(shape, 2, **factory)

    def forward(self, x: Tensor, c: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        shift, scale = self.modulation(c)
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
        self.head = Head(shape, **factory)
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
