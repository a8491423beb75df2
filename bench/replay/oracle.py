"""What an infinite prefix cache would have held: the independent count beside the server's own.

It knows nothing of the server but its block size. It remembers every prompt (and, as far as the answers' token ids are
known, what was generated after it) and counts contiguous leading blocks that were there before, at most all tokens but
the last, which must be computed for its logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[int, int]
"""A request: number of its load level, index in it."""


@dataclass
class Node:
    """A block after a certain beginning. `holders`: requests whose sequence contains it, in order."""

    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    holders: list[Key] = field(default_factory=list)


class Oracle:
    def __init__(self, block_size: int):
        self.block_size = block_size
        self._root = Node()

    def clear(self) -> None:
        """The server's cache was emptied."""
        self._root = Node()

    def count(self, prompt: list[int]) -> int:
        """Tokens of the prompt that an infinite cache would not compute again."""
        known = sum(1 for _ in self.known_blocks(prompt))
        return min(known, max(0, len(prompt) - 1) // self.block_size) * self.block_size

    def known_blocks(self, prompt: list[int]) -> Iterator[Node]:
        """The prompt's leading blocks that are known, in order."""
        node = self._root
        for block in self._blocks(prompt):
            child = node.children.get(block)
            if child is None:
                return
            yield child
            node = child

    def add(self, sequence: list[int], holder: Key) -> None:
        """Remember a prompt, with the generated tokens whose KV was computed (all but the last) behind it."""
        node = self._root
        for block in self._blocks(sequence):
            node = node.children.setdefault(block, Node())
            node.holders.append(holder)

    def _blocks(self, token_ids: list[int]) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            yield tuple(token_ids[start : start + size])
