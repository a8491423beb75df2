from engine.worker import run_worker
from prefill_worker.worker import PrefillWorker

run_worker(PrefillWorker, "prefill", "p0")
