"""A small transformer for text."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.inputs import require_sequences


class Block(nn.Module):
    """Attention and two linear layers, each after a LayerNorm and beside a way round them (Xiong et al. 2020)."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.joined(self._attention(self.norms[0](x))))
        inner = nn.functional.gelu(self.wider(self.norms[1](x)))
        y: Tensor = x + self.dropout(self.narrower(inner))
        return y

    def _attention(self, x: Tensor) -> Tensor:
        # Written out: torch's fused attention has no rule for several models at once (vmap).
        q, k, v = self.queries_keys_values(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(ahead, -math.inf)
        found: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return found


class Transformer(nn.Module):
    """Small transformer over tokens, 2 layers of width 64 with 4 heads; one output per token or per sequence.

    It says a class for every position (data.task tokens), or one for the whole sequence, from the mean of all
    positions. Vaswani et al.: Attention Is All You Need, NeurIPS 2017; norms come first, as in Xiong et al., ICML 2020.

    Args:
        shape: Shape of one input: its number of positions.
        num_classes: Number of outputs.
        vocabulary: Number of different tokens.
        per_token: Whether every position has outputs of its own.
        width: Numbers by which a token is represented; a multiple of heads.
        heads: Attention heads of each layer.
        layers: Number of layers.
        causal: Whether a position sees only those before it, as the next token asks for; false for tags.
        dropout: Probability of dropping a unit in training; 0 is none.
    """

    def __init__(
        self,
        shape: Sequence[int],
        num_classes: int,
        vocabulary: int,
        per_token: bool,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            min(width, heads, layers) >= 1 and width % heads == 0,
            "model.width must be a multiple of model.heads, and model.layers at least 1, got "
            f"{width}, {heads} and {layers}",
        )
        require(0 <= dropout < 1, f"model.dropout must lie in [0, 1), got {dropout}")
        require_sequences("transformer", shape)
        self.per_token = per_token
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.norm(self.blocks(self.embedding(tokens) + self.places))
        outputs: Tensor = self.output(states if self.per_token else states.mean(1))
        return outputs
