"""Hand-written language models, as people keep them in one file: no transformers class in them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VOCABULARY, _WIDTH, _HEADS, _LAYERS, _LENGTH = 80, 48, 4, 4, 256


class OwnLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.shift = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return (centred * scale * self.gain.float() + self.shift.float()).to(x.dtype)


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return (F.normalize(x.float(), dim=-1) * math.sqrt(x.shape[-1])).to(x.dtype) * self.g


class OwnAttention(nn.Module):
    """Fused query, key and value; scores, mask and softmax written out."""

    def __init__(self, width: int, heads: int, *, alibi: bool) -> None:
        super().__init__()
        self.heads, self.alibi = heads, alibi
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        if self.alibi:
            steps = torch.arange(length, device=x.device)
            slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=x.device)
            scores = scores + (slopes[:, None, None] * (steps[None, :] - steps[:, None])).to(x.dtype)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = F.softmax(scores.masked_fill(future, -math.inf).float(), -1).to(x.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class OwnBlock(nn.Module):
    def __init__(self, norm: type[nn.Module], *, alibi: bool, parallel: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.norm1 = norm(_WIDTH)
        self.attention = OwnAttention(_WIDTH, _HEADS, alibi=alibi)
        if not parallel:
            self.norm2 = norm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        if self.parallel:
            return x + self.attention(normed) + self.down(F.silu(self.up(normed)))  # type: ignore[no-any-return]
        x = x + self.attention(normed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class OwnModel(nn.Module):
    """Learned positions unless ALiBi; `scale` multiplies the embeddings; the head may be tied."""

    def __init__(
        self,
        norm: type[nn.Module] = OwnLayerNorm,
        *,
        alibi: bool = False,
        parallel: bool = False,
        tied: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.alibi, self.scale = alibi, scale
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        if not alibi:
            self.places = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(OwnBlock(norm, alibi=alibi, parallel=parallel) for _ in range(_LAYERS))
        self.norm = norm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) * self.scale
        if not self.alibi:
            x = x + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


GPT = functools.partial(OwnModel, nn.LayerNorm)
ALIBI = functools.partial(OwnModel, OwnRMSNorm, alibi=True)
PARALLEL = functools.partial(OwnModel, OwnLayerNorm, parallel=True, tied=True, scale=_WIDTH**0.5)
