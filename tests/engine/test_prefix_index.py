import pytest

from engine import prefix_index
from engine.block_hash import encode_tokens, hash_blocks
from engine.prefix_index import PrefixIndex

BLOCK = 2


class Tree:
    """Builds an index from strings: "abcd" is a path of two blocks, "ab" and "abcd"."""

    def __init__(self):
        self.index = PrefixIndex(BLOCK)
        self.nodes = {}

    def add(self, path: str, salt: str = ""):
        for end in range(BLOCK, len(path) + 1, BLOCK):
            if path[:end] not in self.nodes:
                parent = self.nodes.get(path[: end - BLOCK])
                tokens = encode_tokens([ord(letter) for letter in path[end - BLOCK : end]])
                node = self.index.insert(parent, tokens, len(self.nodes), salt)
                self.nodes[path[:end]] = node
        return self.nodes[path]

    def pin(self, *paths: str):
        for path in paths:
            self.index.pin(self.nodes[path])

    def unpin(self, *paths: str):
        for path in paths:
            self.index.unpin(self.nodes[path])

    def evict(self) -> str:
        node = self.index.evict()
        path = next(path for path, known in self.nodes.items() if known is node)
        del self.nodes[path]
        return path

    def evict_all(self) -> list[str]:
        return [self.evict() for _ in range(self.index.num_evictable)]

    def match(self, text: str, salt: str = "") -> list[int]:
        found = self.index.match([ord(letter) for letter in text], len(text) // BLOCK, salt)
        return [node.block_id for node in found]


@pytest.fixture
def tree():
    return Tree()


def test_match_finds_the_longest_path_of_full_blocks(tree):
    tree.add("abcdef")
    tree.add("abxy")
    assert tree.match("abcdefgh") == [0, 1, 2]
    assert tree.match("abcde") == [0, 1]
    assert tree.match("abxyzz") == [0, 3]
    assert tree.match("abzz") == [0]
    assert tree.match("bacd") == tree.match("a") == tree.match("cd") == []


def test_match_stops_at_the_limit(tree):
    tree.add("abcdef")
    assert len(tree.index.match([ord(letter) for letter in "abcdef"], 2)) == 2


def test_salts_do_not_see_each_other(tree):
    tree.add("abcd", salt="one")
    assert tree.match("abcd", "one") == [0, 1]
    assert tree.match("abcd") == tree.match("abcd", "two") == []


def test_a_chain_is_evicted_from_its_leaf(tree):
    tree.add("abcdef")
    tree.unpin("ab", "abcd", "abcdef")  # even if its head was let go first
    assert tree.evict_all() == ["abcdef", "abcd", "ab"]


def test_leaves_go_in_least_recently_used_order(tree):
    for path in ("ax", "bx", "cx"):
        tree.add(path)
    tree.unpin("bx", "cx", "ax")
    tree.pin("bx")
    tree.unpin("bx")
    assert tree.evict_all() == ["cx", "ax", "bx"]


def test_a_parent_that_became_a_leaf_takes_its_place_by_its_own_last_use(tree):
    # Last uses: abcd 1, zz 2, ab 3, qq 4.
    for path in ("abcd", "zz", "qq"):
        tree.add(path)
    tree.unpin("abcd", "zz", "ab", "qq")
    assert tree.evict_all() == ["abcd", "zz", "ab", "qq"]


def test_a_parent_older_than_other_leaves_goes_as_soon_as_its_children_are_gone(tree):
    # Last uses: ab 1, zz 2, abcd 3, qq 4. ab is the oldest but may not go before abcd.
    for path in ("abcd", "zz", "qq"):
        tree.add(path)
    tree.unpin("ab", "zz", "abcd", "qq")
    assert tree.evict_all() == ["zz", "abcd", "ab", "qq"]


def test_branches_are_evicted_before_the_prefix_they_share(tree):
    tree.add("abcd")
    tree.add("abef")
    tree.unpin("abcd", "abef", "ab")
    assert tree.evict_all() == ["abcd", "abef", "ab"]


def test_nothing_above_a_referenced_block_is_evictable(tree):
    tree.add("abcdef")
    tree.add("abgh")
    tree.unpin("ab", "abcd", "abgh")  # abcdef stays referenced
    assert tree.index.num_evictable == 1
    assert tree.evict_all() == ["abgh"]
    tree.unpin("abcdef")
    assert tree.evict_all() == ["abcdef", "abcd", "ab"]


def test_a_new_child_protects_its_parent(tree):
    tree.add("ab")
    tree.unpin("ab")
    assert tree.index.num_evictable == 1
    tree.add("abcd")
    assert tree.index.num_evictable == 0
    tree.unpin("abcd")
    assert tree.evict_all() == ["abcd", "ab"]


def test_the_eviction_queue_does_not_grow_with_use(tree):
    for number in range(10):
        tree.add(f"{number}x")
    for _ in range(200):
        for number in range(10):
            tree.unpin(f"{number}x")
            tree.pin(f"{number}x")
    assert len(tree.index._leaves) <= 2 * 10 + 16 + 1
    tree.unpin(*[f"{number}x" for number in (3, 1, 4, 5, 9, 2, 6, 8, 7, 0)])
    assert tree.evict_all() == [f"{number}x" for number in (3, 1, 4, 5, 9, 2, 6, 8, 7, 0)]


def test_blocks_whose_hashes_collide_are_not_mistaken_for_each_other(tree, monkeypatch):
    monkeypatch.setattr(prefix_index, "hash_block", lambda parent, tokens: b"the same for all")
    tree.add("ab")
    assert tree.match("ab") == [0]
    assert tree.match("cd") == tree.match("ab", "salt") == []
    assert tree.match("abab") == [0]
    assert tree.index.insert(None, encode_tokens([99, 100]), 1) is None


def test_changes_are_the_chained_hashes(tree):
    tree.add("abcd")
    assert tree.index.drain_changes() == (hash_blocks([ord(letter) for letter in "abcd"], BLOCK), [])
    tree.unpin("abcd", "ab")
    tree.evict()
    assert tree.index.drain_changes() == ([], hash_blocks([ord(letter) for letter in "abcd"], BLOCK)[1:])
    assert tree.index.drain_changes() == ([], [])


def test_what_enters_and_leaves_between_two_drains_is_not_reported(tree):
    tree.add("ab")
    tree.unpin("ab")
    tree.evict()
    assert tree.index.drain_changes() == ([], [])


def test_what_leaves_and_enters_again_between_two_drains_is_not_reported(tree):
    key = tree.add("ab").hash
    assert tree.index.drain_changes() == ([key], [])
    tree.unpin("ab")
    tree.evict()
    tree.add("ab")
    assert tree.index.drain_changes() == ([], [])
    tree.unpin("ab")
    tree.evict()
    tree.add("ab")
    tree.unpin("ab")
    tree.evict()
    assert tree.index.drain_changes() == ([], [key])


def test_clear_returns_children_before_parents_and_reports_all_as_gone(tree):
    keys = [tree.add(path).hash for path in ("ab", "abcd", "ef")]
    tree.index.drain_changes()
    assert [node.block_id for node in tree.index.clear()] == [2, 1, 0]
    entered, left = tree.index.drain_changes()
    assert entered == [] and set(left) == set(keys)
    assert tree.match("abcd") == [] and tree.index.num_evictable == 0
