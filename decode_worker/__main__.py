from decode_worker.worker import DecodeWorker
from engine.worker import run_worker
from kv_transfer.channel import ChannelError

run_worker(DecodeWorker, "decode", "d0", ChannelError)
