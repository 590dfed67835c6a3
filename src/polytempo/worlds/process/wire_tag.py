"""The one number by which a transport tells messages of a pair of ranks apart.

bit 30    29 … 25    24 … 10               9 … 0
0         path of channels (20 bits)       tag        of a whole group
1         group      path (20 bits)        tag (5)    of a group along axes of a mesh
"""

from __future__ import annotations

from polytempo.core.mesh import MOST_GROUPS
from polytempo.core.port import CHANNELS_OF_A_GROUP

_TAGS_OF_A_WHOLE = 1024
_TAGS_IN_A_MESH = 32


def wire_tag(channel: int, tag: int) -> int:
    """A message's number, from 0 to 2³¹ - 1; others for other groups, channels and tags.

    Raises ValueError for a tag, or a mesh in a mesh, that has no place in it.
    """
    group, path = divmod(channel, CHANNELS_OF_A_GROUP)
    num_tags = _TAGS_IN_A_MESH if group else _TAGS_OF_A_WHOLE
    if not 0 <= tag < num_tags:
        where = "in a group of a mesh " if group else ""
        raise ValueError(f"tags {where}run from 0 to {num_tags - 1}, got {tag}")
    if group >= MOST_GROUPS:
        raise ValueError("a group of a mesh that lies within a group of a mesh sends no messages; lay out one mesh")
    place = MOST_GROUPS + group if group else 0
    return (place * CHANNELS_OF_A_GROUP + path) * num_tags + tag
