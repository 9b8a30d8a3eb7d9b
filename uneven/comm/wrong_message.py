"""A message that arrived with other bits than it was sent with: the words for it, and who had sent it.

Ranks tell the launcher in words why they have lost their group; launch/watch/watch.py leaves a rank out that sends
wrong bits twice in a row.
"""

import re

_SENDER = re.compile(r"verify: chunk \d+ of rank (\d+) arrived with another checksum")


def describe_wrong(number: int, writer: int) -> str:
    return f"verify: chunk {number} of rank {writer} arrived with another checksum than it was sent"


def sender_of(cause: str) -> int | None:
    """The rank whose message was wrong, where that is why a group was given up."""
    found = _SENDER.search(cause)
    return None if found is None else int(found.group(1))
