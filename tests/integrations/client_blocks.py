"""Blocks of other libraries, written as they write them: what stands around sums and norms.

test_clients.py has the models of libraries themselves, where they are installed.
"""

import torch.nn.functional as F
from torch import nn

from .norms import Custom, N


class Layer(nn.Module):
    """In the place of an attention or a feed-forward: it takes what these take."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x, *_, **__):
        return self.linear(x)


class InTuple(Layer):
    def forward(self, x, *_, **__):
        return self.linear(x), None


class Eva(nn.Module):
    """timm's EVA and DeiT 3, with a scale for each channel."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(N), nn.LayerNorm(N)
        self.attn, self.mlp = Layer(), Layer()
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()
        self.gamma_1, self.gamma_2 = (
            nn.Parameter(self.norm1.weight + 1),
            nn.Parameter(self.norm1.weight + 2),
        )

    def forward(self, x, rope=None, attn_mask=None):
        if self.gamma_1 is None:
            x = x + self.drop_path1(self.attn(self.norm1(x), rope=rope, attn_mask=attn_mask))
            x = x + self.drop_path2(self.mlp(self.norm2(x)))
        else:
            x = x + self.drop_path1(
                self.gamma_1 * self.attn(self.norm1(x), rope=rope, attn_mask=attn_mask)
            )
            x = x + self.drop_path2(self.gamma_2 * self.mlp(self.norm2(x)))
        return x


class SegmentAnything(nn.Module):
    """The image encoder's Block, without windows."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(N), nn.LayerNorm(N)
        self.attn, self.mlp, self.window_size = Layer(), Layer(), 0

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        if self.window_size > 0:
            x = F.pad(x, (0, 0, 0, self.window_size))
        x = self.attn(x)
        x = shortcut + x
        x = x + self.mlp(self.norm2(x))
        return x


class TitanQwen(nn.Module):
    """torchtitan's Qwen 3."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(N), nn.RMSNorm(N)
        self.attention, self.feed_forward = Layer(), Layer()
        self.moe_enabled = False

    def forward(self, x, rope_cache=None, attention_masks=None, positions=None):
        x = x + self.attention(self.attention_norm(x), rope_cache, attention_masks, positions)
        if self.moe_enabled:
            x = x + self.moe(self.ffn_norm(x))
        else:
            x = x + self.feed_forward(self.ffn_norm(x))
        return x


class Torchtune(nn.Module):
    """TransformerSelfAttentionLayer."""

    def __init__(self):
        super().__init__()
        self.sa_norm, self.mlp_norm = Custom(), Custom()
        self.attn, self.mlp = Layer(), Layer()
        self.sa_scale, self.mlp_scale = Layer(), Layer()

    def forward(self, x, *, mask=None, input_pos=None, **kwargs):
        h = self.sa_norm(x)
        attn_out = self.attn(h, h, mask=mask, input_pos=input_pos)
        h = self.sa_scale(attn_out) + x
        mlp_out = self.mlp(self.mlp_norm(h))
        out = h + self.mlp_scale(mlp_out)
        return out


class WhisperDecoder(nn.Module):
    """ResidualAttentionBlock. That of an encoder has None in the place of cross_attn."""

    def __init__(self):
        super().__init__()
        self.attn, self.cross_attn, self.mlp = InTuple(), InTuple(), Layer()
        self.attn_ln, self.cross_attn_ln, self.mlp_ln = (nn.LayerNorm(N) for _ in range(3))

    def forward(self, x, xa=None, mask=None, kv_cache=None):
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)[0]
        if self.cross_attn:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)[0]
        x = x + self.mlp(self.mlp_ln(x))
        return x


class LitGPT(nn.Module):
    """Block with an option that leaves the sum to another statement."""

    def __init__(self, parallel: bool = False):
        super().__init__()
        self.norm_1, self.norm_2 = Custom(), Custom()
        self.attn, self.mlp, self.post_mlp_norm = Layer(), Layer(), nn.Identity()
        self.parallel_residual = parallel

    def forward(self, x):
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed)
        if self.parallel_residual:
            x_normed = self.norm_2(x)
            x = attention_output + x
        else:
            x = attention_output + x
            x_normed = self.norm_2(x)
        return self.post_mlp_norm(self.mlp(x_normed)) + x


# Of each block, how many of its sums are computed with a norm.
BLOCKS = {Eva: 1, SegmentAnything: 1, TitanQwen: 1, Torchtune: 1, WhisperDecoder: 2, LitGPT: 1}
