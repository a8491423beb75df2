"""The prefix index: a radix tree over chained block hashes that finds computed KV by its tokens.

One node is one full block. A node's path to the root spells the tokens its KV depends on, so a block may be
reused exactly by the prompts that start with its path.

A node is *pinned* while its block, or the block of any descendant, is referenced (by a request or a transfer).
Only unpinned leaves are evicted, least recently used first; a parent whose last child went becomes a leaf.
"""

import heapq
from collections.abc import Sequence, Set

from engine.block_hash import TOKEN_BYTES, encode_tokens, hash_block, root_hash


def expect(condition: bool, message: str) -> None:
    """An assertion that `python -O` does not remove."""
    if not condition:
        raise AssertionError(message)


class Node:
    """A block in the index.

    hash        chained hash of the path down to this block, 16 bytes
    tokens      this block's token ids, encoded (engine/block_hash.py)
    num_pins    1 if the block itself is referenced, plus the number of pinned children
    last_used   tick at which the block's last reference went
    attached    False once evicted or flushed
    """

    __slots__ = ("block_id", "hash", "tokens", "salt", "parent", "num_children", "num_pins", "last_used", "attached")

    def __init__(self, block_id: int, hash: bytes, tokens: bytes, salt: str, parent: "Node | None"):
        self.block_id = block_id
        self.hash = hash
        self.tokens = tokens
        self.salt = salt
        self.parent = parent
        self.num_children = 0
        self.num_pins = 0
        self.last_used = 0
        self.attached = True


class PrefixIndex:
    """Which block holds the KV of which prefix. It refers to blocks; engine/kv_cache.py owns them.

    `match`, `find` and `insert` cost one hash a block; pins O(1) a change; eviction amortized O(log n).
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.nodes: dict[bytes, Node] = {}
        self.num_evictable = 0  # unpinned nodes: what repeated eviction could yield
        self._leaves: list[
            tuple[int, int, Node]
        ] = []  # heap of (last_used, push number, node), may hold outdated entries
        self._num_pushes = 0
        self._tick = 0
        self._changes: dict[bytes, bool] = {}  # hash -> entered (True) or left (False) since the last drain

    def match(self, token_ids: Sequence[int], max_blocks: int, salt: str = "") -> list[Node]:
        """The longest indexed path that spells a prefix of `token_ids`, at most `max_blocks` full blocks."""
        step = self.block_size * TOKEN_BYTES
        tokens = encode_tokens(token_ids[: max_blocks * self.block_size])
        path: list[Node] = []
        parent = None
        for start in range(0, len(tokens) - step + 1, step):
            parent = self.find(parent, tokens[start : start + step], salt)
            if parent is None:
                break
            path.append(parent)
        return path

    def find(self, parent: Node | None, tokens: bytes, salt: str = "") -> Node | None:
        """The node with these tokens after `parent` (None: at the start of a prompt with this salt)."""
        node = self.nodes.get(hash_block(parent.hash if parent else root_hash(salt), tokens))
        return node if node is not None and self._is_same(node, parent, tokens, salt) else None

    def insert(self, parent: Node | None, tokens: bytes, block_id: int, salt: str = "") -> Node | None:
        """Add a referenced block that `find` does not know. None if another prefix has the same hash."""
        assert parent is None or parent.attached, f"block {block_id} inserted below an evicted block"
        key = hash_block(parent.hash if parent else root_hash(salt), tokens)
        if key in self.nodes:
            return None
        node = self.nodes[key] = Node(block_id, key, tokens, salt, parent)
        self.num_evictable += 1
        if parent:
            parent.num_children += 1
        self.pin(node)
        self._record(key, entered=True)
        return node

    def pin(self, node: Node) -> None:
        """The node's block got its first reference."""
        current: Node | None = node
        while current is not None:
            current.num_pins += 1
            if current.num_pins > 1:
                return
            self.num_evictable -= 1
            current = current.parent

    def unpin(self, node: Node) -> None:
        """The node's block lost its last reference: it is now the most recently used one."""
        self._tick += 1
        node.last_used = self._tick
        current: Node | None = node
        while current is not None:
            current.num_pins -= 1
            if current.num_pins > 0:
                return
            self.num_evictable += 1
            self._offer(current)
            current = current.parent

    def evict(self) -> Node:
        """Remove and return the least recently used unpinned leaf. There must be one (`num_evictable` > 0)."""
        while True:
            entry = heapq.heappop(self._leaves)
            if self._is_live(entry):
                break
        node = entry[2]
        del self.nodes[node.hash]
        node.attached = False
        self.num_evictable -= 1
        self._record(node.hash, entered=False)
        if node.parent:
            node.parent.num_children -= 1
            self._offer(node.parent)
        return node

    def clear(self) -> list[Node]:
        """Remove every node, pinned or not, and return them, children before their parents."""
        removed = list(reversed(self.nodes.values()))
        for node in removed:
            node.attached = False
            self._record(node.hash, entered=False)
        self.nodes = {}
        self.num_evictable = 0
        self._leaves = []
        return removed

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes that entered and that left since the last call. What did both is in neither list, so applying them to
        the previous state, in any order, gives the present one."""
        entered = [key for key, is_in in self._changes.items() if is_in]
        left = [key for key, is_in in self._changes.items() if not is_in]
        self._changes = {}
        return entered, left

    def check(self, referenced: Set[int]) -> dict[int, Node]:
        """Recompute the tree from its parent links and `referenced` (blocks somebody holds), compare it with the
        counters, and return the node of each indexed block. Raises AssertionError naming the block."""
        children: dict[Node | None, list[Node]] = {None: []}
        for key, node in self.nodes.items():
            children.setdefault(node.parent, []).append(node)
            parent_hash = node.parent.hash if node.parent else root_hash(node.salt)
            expect(node.attached and node.hash == key, f"block {node.block_id}: indexed under another block's hash")
            expect(
                hash_block(parent_hash, node.tokens) == key, f"block {node.block_id}: hash does not match its tokens"
            )
        by_block: dict[int, Node] = {}
        pinned: set[Node] = set()
        queued = {entry[2] for entry in self._leaves if self._is_live(entry)}
        stack = [(node, False) for node in children[None]]
        while stack:
            node, descendants_done = stack.pop()
            below = children.get(node, [])
            if not descendants_done:
                stack += [(node, True), *((child, False) for child in below)]
                continue
            name = f"block {node.block_id}"
            expect(node.block_id not in by_block, f"{name}: indexed twice")
            by_block[node.block_id] = node
            pins = (node.block_id in referenced) + sum(child in pinned for child in below)
            if pins:
                pinned.add(node)
            expect(node.num_children == len(below), f"{name}: counts {node.num_children} children, has {len(below)}")
            expect(node.num_pins == pins, f"{name}: counts {node.num_pins} pins, has {pins}")
            expect(bool(pins or below) or node in queued, f"{name}: an unpinned leaf that eviction cannot find")
        lost = [node.block_id for node in self.nodes.values() if node.block_id not in by_block]
        expect(not lost, f"block {lost[0] if lost else 0}: indexed below a block that is not")
        evictable = len(by_block) - len(pinned)
        expect(self.num_evictable == evictable, f"index counts {self.num_evictable} evictable blocks, has {evictable}")
        return by_block

    @staticmethod
    def _is_same(node: Node, parent: Node | None, tokens: bytes, salt: str) -> bool:
        return node.parent is parent and node.tokens == tokens and (parent is not None or node.salt == salt)

    @staticmethod
    def _is_evictable_leaf(node: Node) -> bool:
        return node.attached and node.num_pins == 0 and node.num_children == 0

    def _is_live(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return last_used == node.last_used and self._is_evictable_leaf(node)

    def _offer(self, node: Node) -> None:
        """Queue the node for eviction if it is an unpinned leaf. Entries that stop being true stay behind until popped;
        when they are the majority, the heap is rebuilt without them."""
        if not self._is_evictable_leaf(node):
            return
        self._num_pushes += 1
        heapq.heappush(self._leaves, (node.last_used, self._num_pushes, node))
        if len(self._leaves) > 2 * len(self.nodes) + 16:
            live = {entry[2]: entry for entry in self._leaves if self._is_live(entry)}
            self._leaves = list(live.values())
            heapq.heapify(self._leaves)

    def _record(self, key: bytes, entered: bool) -> None:
        if self._changes.get(key, entered) != entered:
            del self._changes[key]
        else:
            self._changes[key] = entered
