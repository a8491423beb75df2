"""A small SentencePiece-style tokenizer: "▁" for spaces, byte tokens for everything it has no piece for."""

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

PIECES = ["a", "b", "c", "d", "e", "▁", "▁a", "▁b", "ab", "▁ab", "é", ".", "▁▁"]
MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: 0 <unk>, 1 <s>, 2 </s>, 3..258 the byte tokens, then PIECES."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]
