"""The LSTM for text that McMahan et al. (2017) train on Shakespeare, character by character."""

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.inputs import require_sequences


class Lstm(nn.Module):
    """LSTM over tokens: an embedding, two layers of 256 units, a linear layer; 822,570 parameters for 90 characters.

    It says a class for every position (data.task tokens), each from what it has read so far, or one for the whole
    sequence, from its end. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data,
    AISTATS 2017.

    Args:
        shape: Shape of one input: its number of positions.
        num_classes: Number of outputs.
        vocabulary: Number of different tokens.
        per_token: Whether every position has outputs of its own.
        embedding: Numbers by which a token is represented.
        hidden: Units of each layer.
        layers: Number of layers.
        dropout: Probability of dropping a unit between layers in training; 0 is none.
    """

    def __init__(
        self,
        shape: Sequence[int],
        num_classes: int,
        vocabulary: int,
        per_token: bool,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            min(embedding, hidden, layers) >= 1,
            "model.embedding, model.hidden and model.layers must be at least 1, got "
            f"{embedding}, {hidden} and {layers}",
        )
        require(0 <= dropout < 1, f"model.dropout must lie in [0, 1), got {dropout}")
        require_sequences("lstm", shape)
        self.per_token = per_token
        self.embedding = nn.Embedding(vocabulary, embedding)
        between = dropout if layers > 1 else 0.0
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=between)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        outputs: Tensor = self.output(states if self.per_token else states[:, -1])
        return outputs
