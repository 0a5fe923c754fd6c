"""Which pages hold the K/V of which prompt prefixes.

A page is known by a hash of its tokens and of all that come before them: where the hashes agree,
so does the K/V, since prompt tokens run to full depth whatever the request's exit bounds are.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def page_hashes(tokens: Sequence[int], page_size: int, salt: str | None) -> tuple[bytes, ...]:
    """A SHA-256 digest for each full page, chained from page to page; the salt begins the chain."""
    data = np.asarray(tokens, np.int32).tobytes()
    page_bytes = page_size * np.dtype(np.int32).itemsize
    beginning = b"" if salt is None else b"salt" + salt.encode(errors="surrogatepass")
    parent = hashlib.sha256(beginning).digest()
    hashes = []
    for end in range(page_bytes, len(data) + 1, page_bytes):
        parent = hashlib.sha256(parent + data[end - page_bytes : end]).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixCache:
    """Owns what is known of pages, and the order in which those that nobody holds are given up:
    least recently used first."""

    def __init__(self):
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Pages that nobody but the cache holds."""
        return len(self._idle)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The pages of the longest known prefix."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def put(self, page_hash: bytes, page: int) -> bool:
        """Makes a page known; False where another page of the same content is."""
        if page_hash in self._page_of:
            return False
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def let_go(self, page: int) -> bool:
        """Nobody holds this page any more; False where it is not known and the cache does not
        either."""
        if page not in self._hash_of:
            return False
        self._idle[page] = None
        return True

    def take(self, page: int) -> None:
        """Somebody holds this known page again."""
        self._idle.pop(page, None)

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def evict(self) -> int:
        """Forgets the idle page that was used longest ago; raises KeyError without one."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
