"""Health is a round trip through every engine loop, not a socket that accepts."""

import asyncio
from collections.abc import Mapping

from engine.config import SHARED_POOL_CHANNELS, DeploymentConfig
from engine.protocol import Pong, Role
from router.fleet import Fleet, Worker
from router.reports import WorkerHealth


def needs_prefill_worker(config: DeploymentConfig) -> bool:
    """Whether no decode worker can serve every prompt without a prefill worker."""
    topology = config.topology
    shares_pool = topology.channel in SHARED_POOL_CHANNELS
    return topology.prefill_workers > 0 and (topology.local_prefill_max_tokens == 0 or shares_pool)


async def check_workers(
    fleet: Fleet, expected: Mapping[str, Role], timeout_s: float
) -> tuple[bool, list[WorkerHealth]]:
    """Ping all workers at once. True when each registered worker answered and a request has a complete path: a decode
    worker and, where the topology needs one, a prefill worker that this decode worker hears. An expected worker that is
    not there is reported, and by itself makes nothing unhealthy: nothing is routed to it.
    """
    workers = list(fleet.workers.values())
    answers = await asyncio.gather(*(fleet.ping(worker, timeout_s) for worker in workers))
    pongs = {worker.name: answer[1] for worker, answer in zip(workers, answers, strict=True) if answer is not None}
    needs_prefill = needs_prefill_worker(fleet.config)
    reports, has_path = [], False
    for worker, answer in zip(workers, answers, strict=True):
        if answer is None:
            lost = fleet.workers.get(worker.name) is not worker
            detail = "lost just now" if lost else f"its engine loop did not answer within {timeout_s:g} s"
            reports.append(WorkerHealth(worker.name, worker.role, False, None, detail))
            continue
        detail = ""
        if worker.role == "decode":
            heard = _peers_heard(worker, pongs)
            has_path = has_path or bool(heard) or not needs_prefill
            if needs_prefill and not heard:
                detail = "hears no prefill worker"
        reports.append(WorkerHealth(worker.name, worker.role, True, round(answer[0], 3), detail))
    all_answer = all(report.ok for report in reports)
    for name, role in expected.items():
        if name not in fleet.workers and all(report.name != name for report in reports):
            reports.append(WorkerHealth(name, role, False, None, "not registered; it is being started"))
    return all_answer and has_path, sorted(reports, key=lambda report: (report.role, report.name))


def _peers_heard(worker: Worker, pongs: dict[str, Pong]) -> list[str]:
    return [name for name in pongs[worker.name].prefill_peers if name in pongs]
