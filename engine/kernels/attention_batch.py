"""What the paged attention kernels are told about a batch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """S sequences packed into T rows, as int32 tensors on the device. Kernels read lengths there, so that a recorded
    graph of launches can be replayed on other lengths.

    tables       `[num_slots, max_blocks]`: block tables
    slots        `[S]`: the row of `tables` of each sequence
    query_start  `[S]`: its first packed row
    query_len    `[S]`: its rows; 0 for padding
    kv_len       `[S]`: keys its last query sees, that query's own included; 0 for padding
    tiles        `[num_tiles, 2]`: (sequence, or -1 for nothing to do; first of its query rows) for each tile of
                 `tile_rows` rows (prefill only)
    """

    tables: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    query_len: torch.Tensor
    kv_len: torch.Tensor
    tiles: torch.Tensor
    tile_rows: int = 0


@dataclass(frozen=True)
class Groups:
    """Sequences of a decode batch whose block tables start with the same blocks, as int32 tensors on the device.

    members  `[B]`: rows of the batch, those of one tile side by side
    tiles    `[num_tiles, 3]`: first index in `members`, number of members (0: nothing to do), shared keys (whole
    blocks)
    lens     `[B]`: shared keys of each row, 0 for rows in no group
    """

    members: torch.Tensor
    tiles: torch.Tensor
    lens: torch.Tensor
