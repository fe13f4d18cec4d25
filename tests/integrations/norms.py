"""Norm modules for tests of patch, beside those that drawn_norms draws."""

import torch
import torch.nn.functional as F
from torch import nn

N = 24


def rms(x, eps, dims=-1):
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


class Custom(nn.Module):
    """RMSNorm in float32, rounded at the end. The subclasses below each change one thing."""

    def __init__(self, shape=N):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = 1e-6

    def forward(self, x):
        return (rms(x.float(), self.eps) * self.weight).to(x.dtype)


class Scale(nn.Module):
    """RMSNorm whose class and parameter names do not say so. The bias is the first parameter."""

    def __init__(self):
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(N))
        self.epsilon = 1e-6

    def forward(self, tokens):
        y = rms(tokens.float(), self.epsilon) * (1 + self.gain.float()) + self.shift
        return y.type_as(tokens)


class Float32LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class GatedNorm(Custom):
    def forward(self, x, z=None):
        y = rms((x if z is None else x * F.silu(z.float())).float(), self.eps)
        return (y * self.weight).to(x.dtype)


class SigmoidGatedLayerNorm(nn.LayerNorm):
    def forward(self, x, z):
        y = F.layer_norm(x.float(), self.normalized_shape, None, None, self.eps)
        y = y * self.weight.float() + self.bias.float()
        return (y * torch.sigmoid(z.float())).to(x.dtype)


class OfThreeDims(Custom):
    def forward(self, x):
        if x.dim() != 3:
            raise ValueError("takes three dimensions")
        return super().forward(x)


# tilenorm computes none of the modules below.


class ScaledRMSNorm(Custom):
    def forward(self, x):
        return rms(x, self.eps) * self.weight * 1.00001


class NoSubclassNorm(Custom):
    def __init_subclass__(cls):
        raise TypeError("has no subclasses")
