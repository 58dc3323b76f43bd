"""The documents of a packed row do not see each other: by SDPA's mask, FlexAttention's, and by segments."""

from typing import Literal

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.api import PackedRows, PackedSegments, packed_attention, packed_attention_mask
from tests.data.documents import NumberedDocuments, web_like_lengths

# Uncompiled, as it is on a CPU, FlexAttention says that it makes the whole matrix of scores.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
KINDS: list[Literal["sdpa", "flex", "varlen"]] = ["sdpa", "flex", "varlen"]
LENGTH, WIDTH, HEADS, VOCABULARY = 48, 16, 2, 97


class Layer(nn.Module):
    """Attention and a feed-forward, both added."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, mask: object) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if mask is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = packed_attention(q, k, v, mask)  # type: ignore[arg-type]
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.feed_forward(x)


class Model(nn.Module):
    """Two layers, and positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: object) -> Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def packed_batch(num_rows: int = 4, row_length: int = LENGTH) -> dict[str, Tensor]:
    rows = PackedRows(NumberedDocuments(web_like_lengths(60) // 4 + 1), row_length)
    every = [rows[position] for position in range(len(rows))]
    emptiest = max(every, key=lambda row: int((row["documents"] < 0).sum()))
    batch = [*every[: num_rows - 1], emptiest]
    found = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
    found["tokens"] = found["tokens"] % VOCABULARY
    found["labels"] = torch.where(found["labels"] < 0, -100, found["labels"] % VOCABULARY)
    return found


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_document_leaves_every_others_logits_to_the_bit(kind: Literal["sdpa", "flex", "varlen"]) -> None:
    batch, model = packed_batch(), model_of().eval()
    documents = batch["documents"]
    assert (documents == -1).any(), "there is padding to be told apart too"
    mask = packed_attention_mask(documents, kind)
    with torch.no_grad():
        before = model(batch["tokens"], batch["positions"], mask)
        for row in range(len(documents)):
            for changed in documents[row].unique().tolist():
                tokens = batch["tokens"].clone()
                is_changed = torch.zeros_like(documents, dtype=torch.bool)
                is_changed[row] = documents[row] == changed
                tokens[is_changed] = (tokens[is_changed] + 1) % VOCABULARY
                after = model(tokens, batch["positions"], mask)
                assert torch.equal(after[~is_changed], before[~is_changed])
                assert not torch.equal(after[is_changed], before[is_changed])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_every_kind_is_attention_in_each_document_alone(
    kind: Literal["sdpa", "flex", "varlen"], causal: bool, kv_heads: int
) -> None:
    documents = packed_batch(3, 130)["documents"]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 4, 130, 8, generator=generator)
    key, value = (torch.randn(3, kv_heads, 130, 8, generator=generator) for _ in range(2))
    found = packed_attention(query, key, value, packed_attention_mask(documents, kind, causal=causal))
    assert found.shape == query.shape
    num_seen = 0
    for row in range(3):
        for number in documents[row].unique():
            own = documents[row] == number
            parts = (x[row : row + 1, :, own].double() for x in (query, key, value))
            expected = F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)
            torch.testing.assert_close(found[row : row + 1, :, own].double(), expected, rtol=1e-5, atol=1e-6)
            num_seen += int(own.sum())
    assert num_seen == documents.numel()


def test_segments_are_the_documents_of_all_rows_with_their_padding() -> None:
    documents = torch.tensor([[0, 0, 0, 1, -1, -1], [0, 0, 0, 0, 0, 0]])
    segments = packed_attention_mask(documents, "varlen")
    assert isinstance(segments, PackedSegments)
    assert segments.cu_seqlens.tolist() == [0, 3, 4, 6, 12]
    assert segments.cu_seqlens.dtype is torch.int32
    assert segments.max_seqlen == 6


def test_on_a_cpu_the_mask_is_sdpas() -> None:
    mask = packed_attention_mask(torch.tensor([[0, 0, 1, -1]]))
    assert isinstance(mask, Tensor)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_another_kind_or_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind='flash' is unknown\. Use one of 'auto', 'sdpa', 'flex', 'varlen'"):
        packed_attention_mask(torch.zeros(1, 2), "flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"documents have the shape \(2,\)\. Give those of a batch"):
        packed_attention_mask(torch.zeros(2))


def test_packed_rows_train_as_their_documents_one_by_one() -> None:
    """In float64, by the sum over tokens; documents that were cut by a row are trained as their pieces."""
    lengths = web_like_lengths(40) // 4 + 1
    assert max(lengths) > LENGTH
    rows = PackedRows(NumberedDocuments(lengths), LENGTH)
    packed, single = model_of().double(), model_of().double()
    batch = torch.utils.data.default_collate([rows[position] for position in range(len(rows))])
    tokens, labels = batch["tokens"] % VOCABULARY, torch.where(batch["labels"] < 0, -100, batch["labels"] % VOCABULARY)
    logits = packed(tokens, batch["positions"], packed_attention_mask(batch["documents"], "sdpa"))
    num_labels = int((labels != -100).sum())
    assert num_labels == int(batch["weights"].sum()) == sum(lengths) - len(lengths)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()

    documents = NumberedDocuments(lengths)
    total = 0.0
    for position in range(len(documents)):
        ids = torch.from_numpy(documents[position] % VOCABULARY)
        for start in range(0, len(ids), LENGTH):
            piece, following = ids[start : start + LENGTH], ids[start + 1 : start + LENGTH + 1]
            alone = single(piece[None], torch.arange(len(piece))[None], None)[0, : len(following)]
            part = F.cross_entropy(alone, following, reduction="sum") / num_labels
            part.backward()
            total += part.item()
    assert loss.item() == pytest.approx(total, rel=1e-12)
    for ours, theirs in zip(packed.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-13)
