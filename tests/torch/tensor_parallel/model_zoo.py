"""Models that nobody here wrote, tiny and with random weights, and what a step of them sends.

Everything is made on the spot: no file is read and nothing is fetched.
"""
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

# Not by an import statement: pylint would read the whole package, which takes it minutes.
transformers = import_module("transformers")

VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 96, 32, 64, 2, 4
HEAD = WIDTH // HEADS
ROWS, LENGTH = 4, 12
FLOAT = 4  # bytes

_DECODER = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
            "max_position_embeddings": 64}
_ENCODER = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "intermediate_size": INNER, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0}

ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"
ALL_TO_ALL = "differentiable_all_to_all_single"


@dataclass(frozen=True)
class Entry:
    """A model and the theory of its plan.

    Attributes:
        make: makes the model.
        inputs: arguments of its forward for a batch; all have the rows in dim 0.
        pairs: blocks of column-wise layers with a row-wise one behind.
        tokens: positions of a row.
        vocabulary: whether the embedding and the head are split.
        fused: projections of query, key and value in one.
        small: elements of each whole parameter that split activations meet.
    """

    make: Callable[[], nn.Module]
    inputs: Mapping[str, torch.Tensor]
    pairs: int = 2 * LAYERS
    tokens: int = LENGTH
    vocabulary: bool = True
    fused: int = 0
    small: tuple[int, ...] = field(default=())

    def traffic(self, rows: int, size: int) -> Counter:
        """Calls by name and bytes given by (name,), for one forward and backward on ``rows`` rows.

        The formula of docs/models.md, with n = ``size`` ranks.
        """
        value = FLOAT * rows * self.tokens * WIDTH
        sent: Counter = Counter()

        def add(name: str, calls: int, total: int) -> None:
            if calls:
                sent[name] += calls
                sent[(name,)] += total

        add(ALL_REDUCE, 2 * self.pairs, 2 * self.pairs * value)
        if self.vocabulary:
            add(ALL_REDUCE, 2, 2 * value)  # the embedding's sum, the gradient before the head
            add(ALL_GATHER, 1, FLOAT * rows * self.tokens * VOCABULARY // size)
        add(ALL_TO_ALL, 2 * self.fused, 2 * self.fused * 3 * value // size)
        add(ALL_REDUCE, len(self.small), FLOAT * sum(self.small))
        return sent


class Encoder(nn.Module):
    """PyTorch's own encoder, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.encoder(hidden)
        return {"logits": logits, "loss": (logits - labels).square().mean()}


def _numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int, below: int = VOCABULARY, shape: tuple[int, ...] = (ROWS, LENGTH)
            ) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(1), "labels": _tokens(2)}


def _padded() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([[12], [7], [5], [12]])
    return {**_text(), "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def _of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


MODELS: dict[str, Entry] = {
    "llama": Entry(_of("LlamaForCausalLM", "LlamaConfig", **_DECODER), _text()),
    "qwen3": Entry(_of("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=HEAD,
                       tie_word_embeddings=True), _padded(), small=(HEAD,) * 2 * LAYERS),
    "gpt2": Entry(_of("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=64,
                      n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=INNER, resid_pdrop=0.0,
                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
                      loss_type="ForCausalLM"), _text(), fused=LAYERS),
    "mixtral": Entry(_of("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4),
                     _text(), pairs=LAYERS),
    "bert": Entry(_of("BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY,
                      max_position_embeddings=64, **_ENCODER), _padded()),
    "vit": Entry(_of("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4,
                     num_labels=3, **_ENCODER),
                 {"pixel_values": _numbers(ROWS, 3, 16, 16), "labels": _tokens(3, 3, (ROWS,))},
                 tokens=17, vocabulary=False),
    "encoder": Entry(Encoder, {"hidden": _numbers(ROWS, LENGTH, WIDTH),
                               "labels": _numbers(ROWS, LENGTH, WIDTH, seed=2)},
                     pairs=LAYERS, vocabulary=False),
}
transformers.logging.set_verbosity_error()
