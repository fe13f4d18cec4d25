"""Blocks of other libraries, written as they write them: what stands around sums and norms."""

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


class Timm(nn.Module):
    """VisionTransformer's Block."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(N), nn.LayerNorm(N)
        self.attn, self.mlp = Layer(), Layer()
        self.ls1, self.ls2, self.drop_path1, self.drop_path2 = (nn.Identity() for _ in range(4))

    def forward(self, x, attn_mask=None):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x


class Eva(Timm):
    """EVA's and DeiT 3's, with a scale for each channel."""

    def __init__(self):
        super().__init__()
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


class OpenClip(nn.Module):
    """ResidualAttentionBlock."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(N), nn.LayerNorm(N)
        self.attn, self.mlp = InTuple(), nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, N))
        self.ls_1, self.ls_2 = nn.Identity(), nn.Identity()

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = k_x if k_x is not None else q_x
        return self.attn(q_x, k_x, v_x, need_weights=False, attn_mask=attn_mask)[0]

    def forward(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = self.ln_1_kv(k_x) if hasattr(self, "ln_1_kv") and k_x is not None else None
        v_x = self.ln_1_kv(v_x) if hasattr(self, "ln_1_kv") and v_x is not None else None
        x = q_x + self.ls_1(
            self.attention(q_x=self.ln_1(q_x), k_x=k_x, v_x=v_x, attn_mask=attn_mask)
        )
        x = x + self.ls_2(self.mlp(self.ln_2(x)))
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


class TitanLlama(nn.Module):
    """torchtitan's Llama 3."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(N), nn.RMSNorm(N)
        self.attention, self.feed_forward = Layer(), Layer()

    def forward(self, x, freqs_cis=None, attention_masks=None, positions=None):
        h = x + self.attention(self.attention_norm(x), freqs_cis, attention_masks, positions)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out


class TitanQwen(TitanLlama):
    """torchtitan's Qwen 3."""

    def __init__(self):
        super().__init__()
        self.moe_enabled = False

    def forward(self, x, rope_cache=None, attention_masks=None, positions=None):
        x = x + self.attention(self.attention_norm(x), rope_cache, attention_masks, positions)
        if self.moe_enabled:
            x = x + self.moe(self.ffn_norm(x))
        else:
            x = x + self.feed_forward(self.ffn_norm(x))
        return x


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(N, bias=False), nn.LayerNorm(N, bias=False)
        self.attn, self.mlp = Layer(), Layer()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
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


class Whisper(nn.Module):
    """ResidualAttentionBlock of an encoder."""

    def __init__(self):
        super().__init__()
        self.attn, self.attn_ln, self.mlp, self.mlp_ln = Layer(), nn.LayerNorm(N), Layer(), None
        self.cross_attn, self.cross_attn_ln = None, None
        self.attn, self.mlp_ln = InTuple(), nn.LayerNorm(N)

    def forward(self, x, xa=None, mask=None, kv_cache=None):
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)[0]
        if self.cross_attn:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)[0]
        x = x + self.mlp(self.mlp_ln(x))
        return x


class WhisperDecoder(Whisper):
    def __init__(self):
        super().__init__()
        del self.cross_attn, self.cross_attn_ln
        self.cross_attn, self.cross_attn_ln = InTuple(), nn.LayerNorm(N)


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
BLOCKS = {
    Timm: 1,
    Eva: 1,
    OpenClip: 1,
    SegmentAnything: 1,
    TitanLlama: 1,
    TitanQwen: 1,
    NanoGPT: 1,
    Torchtune: 1,
    Whisper: 1,
    WhisperDecoder: 2,
    LitGPT: 1,
}
