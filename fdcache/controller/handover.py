"""The hand-over endpoint of a controller: its planes, and the layer groups that are announced together."""

from __future__ import annotations

from collections.abc import Sequence

from fdcache.controller.layers import layer_groups
from fdcache.devices.base import Device, DevicePlanes, PlaneBinding
from fdcache.devices.cuda import CudaDevice
from fdcache.errors import TransferError
from fdcache.layout import KVLayout
from fdcache.settings.cache import TransferSettings
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import LocalPlanes
from fdcache.transfer.endpoint import EndpointOptions, TransferEndpoint


def open_endpoint(
    device: Device,
    layout: KVLayout,
    bindings: Sequence[PlaneBinding],
    planes: DevicePlanes,
    *,
    peers: PeerSettings,
    transfer: TransferSettings,
    rank: int,
    lookahead_tokens: int,
    verifies: bool,
) -> TransferEndpoint:
    """Open the endpoint of one rank. Raises ``TransferError``, also for a connector that reads no GPU."""
    access = device.peer_access(planes) if isinstance(device, CudaDevice) else None
    if device.has_compute_streams and (access is None or peers.connector != "ipc"):
        raise TransferError(
            f"FDCACHE_TRANSFER={peers.connector}: the blocks are on a GPU, and this connector reads CPU memory; use ipc"
        )
    local = LocalPlanes(
        layout,
        planes.table,
        planes.num_blocks,
        tuple(each.address for each in bindings),
        tuple(each.stride for each in bindings),
        access,
    )
    groups = layer_groups(layout.total_layers, transfer.first_group_layers, transfer.group_layers)
    options = EndpointOptions(
        peers, rank, lookahead_tokens=lookahead_tokens, verifies=verifies, groups=tuple(groups)
    )
    return TransferEndpoint(local, options)
