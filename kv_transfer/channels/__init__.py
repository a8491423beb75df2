"""The implementations of KVChannel, one file each. A channel's own dependencies are imported when it is asked for."""

from importlib import import_module

from kv_transfer.channel import ChannelError, KVChannel

CHANNELS = {
    "local": "LocalChannel",
    "shm": "ShmChannel",
    "cuda_ipc": "CudaIpcChannel",
    "cuda_p2p": "CudaP2PChannel",
    "nccl": "NcclChannel",
    "tcp": "TcpChannel",
    "nixl": "NixlChannel",
}


def get_channel(name: str) -> KVChannel:
    """The channel called `name`, which is also its file here.

    Raises ChannelError for an unknown name, and when what the channel needs is not installed.
    """
    if name not in CHANNELS:
        raise ChannelError(f"no channel {name!r}; use one of: {', '.join(CHANNELS)}")
    return getattr(import_module(f"kv_transfer.channels.{name}"), CHANNELS[name])()
