from engine.worker import run_worker
from kv_transfer.channel import ChannelError
from prefill_worker.worker import PrefillWorker

run_worker(PrefillWorker, "prefill", "p0", ChannelError)
