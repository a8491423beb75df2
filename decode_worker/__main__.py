from decode_worker.worker import DecodeWorker
from engine.worker import run_worker

run_worker(DecodeWorker, "decode", "d0")
