"""Norm modules for tests of patch, beside those that drawn_norms draws."""

import torch
from torch import nn

N = 24


def rms(x, eps, dims=-1):
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


class Custom(nn.Module):
    """RMSNorm in float32, rounded at the end."""

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
