"""Runs a replay: what `python3 -m bench.replay` does after its options are read, for other programs to call."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.facts import collect_facts
from bench.progress import Progress, say
from bench.replay.agreement import compare_outputs, load_reference
from bench.replay.captured import captured_report, is_captured, load_captured
from bench.replay.client import LevelRun, RawResponse, run_level
from bench.replay.codegen import turn_text
from bench.replay.fit import Fit, FitReport, fit_trace
from bench.replay.misses import Explainer, Miss, Served
from bench.replay.plan import Level, Tokenize, WorkloadError
from bench.replay.prompts import PromptBuilder, code_corpus, trace_level
from bench.replay.report import Result
from bench.replay.response import RequestRecord, read_response
from bench.replay.server import (
    OPTIONAL_PARAMETERS,
    PROBE_TOKENS,
    Server,
    ServerError,
    ServerFacts,
    counters_between,
    directory_tokenizer,
    load_tokenizer,
    request_body,
)
from bench.replay.source_code import NUM_SESSIONS, session_source
from bench.replay.summary import LevelSummary, Slo, summarize_level
from bench.replay.trace import Trace, load_trace
from bench.replay.transport import Endpoint
from bench.replay.workload import Workload, gather_bounded, make_prefixes, plan_closed_level, plan_level, take_tokens

MISSING_PARAMETER_NOTES = {
    "stream_options": "the server refuses stream_options: no usage, no cached tokens, tokens counted by pieces of text",
    "ignore_eos": "the server refuses ignore_eos: answers may end early, which is not counted as failure",
    "min_tokens": "the server refuses min_tokens: ignore_eos alone keeps answers from ending early",
    "return_token_ids": "the server refuses return_token_ids: token times are those of pieces of text",
}
DEFAULT_BLOCK_SIZE = 64


@dataclass
class ReplayOptions:
    """What to replay, how fast, against which server. One load level for each value of `qps` (eight-session workload),
    `speed` (trace) and `concurrency` (either).

    workload     sizes; of a trace only `output_tokens` (at most), `requests` (at most), `seed` and `code` count
    trace        session files, directories of them, or one Mooncake file; empty: the eight-session workload
    think_s      closed loop, eight sessions: pause between a user's requests
    think_scale  closed loop, trace: factor on recorded pauses
    context      tokens a trace is made to fit; None: what the server says its model holds
    block_size   of the server's prefix cache; None: measured
    reference    .requests.jsonl of an earlier replay of the same input, to compare answers with
    """

    url: str
    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    model: str | None = None
    tokenizer: str | None = None
    qps: list[float] = field(default_factory=list)
    concurrency: list[int] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    think_s: float = 0.0
    think_scale: float = 1.0
    session_gap_s: float = 0.0
    trace: list[Path] = field(default_factory=list)
    max_requests: int | None = None
    fit: Fit = "shared"
    context: int | None = None
    block_tokens: int | None = None
    block_size: int | None = None
    timeout_s: float = 300.0
    flush_cache: bool = False
    reference: Path | None = None


async def run_replay(options: ReplayOptions, result: Result | None = None) -> Result:
    """Every load level, one after another. Raises ServerError and WorkloadError when it cannot run at all.

    `result` is filled as levels end, so that a caller who is interrupted has those that did.
    """
    reference = load_reference(options.reference) if options.reference else {}
    result = result if result is not None else Result(slo=options.slo, flushed_between_levels=options.flush_cache)
    async with Server(options.url) as server:
        facts = await server.describe(options.model)
        say(f"server {server.url}, model {facts.model}")
        tokenize = directory_tokenizer(options.tokenizer) if options.tokenizer else server.tokenizer(facts.model)
        facts.accepted_parameters = await server.accepted_parameters(facts.model, (await tokenize("import os\n"))[:4])
        notes = [MISSING_PARAMETER_NOTES[name] for name in OPTIONAL_PARAMETERS if name not in facts.accepted_parameters]
        facts.block_size = options.block_size or await measure_block_size(server, facts, tokenize)
        if facts.block_size is None:
            notes.append(
                f"the server's cache shows no block size: ideal hits are counted in blocks of {DEFAULT_BLOCK_SIZE} "
                "tokens (see --block-size)"
            )
        for note in notes:
            say(f"note: {note}")
        planner = await make_planner(options, server, facts, tokenize)
        result.facts, result.server, result.notes = collect_facts(), facts, notes
        result.workload, result.trace = planner.workload, planner.fit_report
        explainer = Explainer(facts.block_size or DEFAULT_BLOCK_SIZE)
        for make_level in planner.levels:
            level = await make_level()
            if options.flush_cache:
                await server.flush_cache()
                explainer.clear()
            summary = await run_one_level(server, level, options, explainer, result)
            if reference:
                summary.agreement = compare_outputs(reference, level.label, result.records[-1])
    return result


async def measure_block_size(server: Server, facts: ServerFacts, tokenize: Tokenize) -> int | None:
    room = min(PROBE_TOKENS, (facts.max_model_len or PROBE_TOKENS) - 2)
    size = 1 << max(0, room.bit_length() - 1)  # a power of two is a multiple of most block sizes
    return await server.cache_block_size(facts.model, await take_tokens(turn_text(0, "probe", 0, 0), size, tokenize))


@dataclass
class Planner:
    """Levels in order, each made when its turn comes; the workload or, for a trace, how it was fitted."""

    levels: list[Callable[[], Awaitable[Level]]]
    workload: Workload | None = None
    fit_report: FitReport | None = None


async def make_planner(options: ReplayOptions, server: Server, facts: ServerFacts, tokenize: Tokenize) -> Planner:
    if options.trace:
        return await trace_planner(options, server, facts, tokenize)
    workload = options.workload
    check_lengths(workload, facts.max_model_len)
    prefixes = await make_prefixes(workload, tokenize)

    levels: list[Callable[[], Awaitable[Level]]] = [
        partial(plan_level, workload, qps, prefixes, tokenize) for qps in options.qps
    ]
    levels += [
        partial(plan_closed_level, workload, concurrency, options.think_s, prefixes, tokenize)
        for concurrency in options.concurrency
    ]
    return Planner(levels, workload)


async def trace_planner(options: ReplayOptions, server: Server, facts: ServerFacts, tokenize: Tokenize) -> Planner:
    context = options.context or facts.max_model_len
    if is_captured(options.trace):
        messages = partial(server.tokenize_messages, facts.model)
        path, most = options.trace[0], options.workload.output_tokens
        trace, prompts = await load_captured(path, most, options.max_requests, tokenize, messages)
        report = captured_report(trace, prompts, context, facts.block_size or DEFAULT_BLOCK_SIZE)
    else:
        trace, prompts, report = await recorded_prompts(options, context, tokenize)
    say(
        f"trace {trace.name}: {len(trace.requests)} requests in {trace.num_sessions} sessions, "
        f"{report.prompt_tokens} prompt tokens (recorded {report.recorded_prompt_tokens}), ideal hit rate "
        f"{report.hit_rate:.1%} (recorded {report.recorded_hit_rate:.1%})"
    )

    async def level(speed: float | None, concurrency: int | None) -> Level:
        return trace_level(
            trace,
            prompts,
            speed=speed,
            concurrency=concurrency,
            think_scale=options.think_scale,
            session_gap_s=options.session_gap_s,
        )

    levels: list[Callable[[], Awaitable[Level]]] = [partial(level, speed, None) for speed in options.speed]
    levels += [partial(level, None, concurrency) for concurrency in options.concurrency]
    return Planner(levels, None, report)


async def recorded_prompts(
    options: ReplayOptions, context: int | None, tokenize: Tokenize
) -> tuple[Trace, list[list[int]], FitReport]:
    """A trace of block ids, made to fit, and the prompts made for it."""
    trace, workload = load_trace(options.trace), options.workload
    if options.max_requests is not None:
        trace = Trace(trace.name, trace.block_tokens, trace.requests[: options.max_requests])
    trace, report = fit_trace(trace, context, workload.output_tokens, options.fit, options.block_tokens)
    texts = [session_source(workload.code, workload.seed, session) for session in range(NUM_SESSIONS)]
    builder = PromptBuilder(await code_corpus(texts, tokenize), trace.block_tokens, workload.seed)
    return trace, [builder.prompt(request) for request in trace.requests], report


def check_lengths(workload: Workload, max_model_len: int | None) -> None:
    needed = workload.prompt_tokens + workload.output_tokens
    if max_model_len is not None and needed > max_model_len:
        raise WorkloadError(
            f"a request needs {needed} tokens, the model holds {max_model_len}; "
            "lower --prefix-tokens, --new-tokens or --output-tokens"
        )


async def run_one_level(
    server: Server, level: Level, options: ReplayOptions, explainer: Explainer, result: Result
) -> LevelSummary:
    """Send a level, read the answers, explain the misses; the summary is also added to `result`."""
    facts = result.server
    assert facts is not None
    accepted = facts.accepted_parameters
    bodies = [
        request_body(facts.model, request.prompt_token_ids, request.output_tokens, accepted)
        for request in level.requests
    ]
    say(f"{level.label}: {len(bodies)} requests, {sum(len(r.prompt_token_ids) for r in level.requests)} prompt tokens")
    before = await server.counters()
    run = await run_with_progress(server.completions, level, bodies, options.timeout_s)
    counters = counters_between(before, await server.counters())
    records = [
        read_response(request, response, "ignore_eos" in accepted)
        for request, response in zip(level.requests, run.responses)
    ]
    say(f"{level.label}: answers are in; comparing cache hits with the ideal")
    text_of = text_source(server, facts.model, options)
    await explain_level(level, records, explainer, (len(result.levels), run.started_unix), text_of)
    summary = summarize_level(level, records, options.slo, run, explainer.block_size)
    summary.counters = counters
    result.levels.append(summary)
    result.records.append(records)
    return summary


async def run_with_progress(endpoint: Endpoint, level: Level, bodies: list[bytes], timeout_s: float) -> LevelRun:
    counts = {"sent": 0, "ended": 0, "failed": 0}
    with Progress(level.label, len(level.requests)) as progress:

        def on_event(event: str, response: RawResponse) -> None:
            counts[event] += 1
            counts["failed"] += event == "ended" and not response.looks_ok
            running = counts["sent"] - counts["ended"]
            progress.update(counts["ended"], f"done, {running} running, {counts['failed']} failed")

        return await run_level(endpoint, level.requests, bodies, timeout_s, on_event)


TextOf = Callable[[list[int]], Awaitable[str]]


def text_source(server: Server, model: str, options: ReplayOptions) -> TextOf:
    """Text of token ids from the tokenizer given or the server's /detokenize; the ids themselves without either."""
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None

    async def text_of(token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        if tokenizer is not None:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        try:
            text = await server.detokenize(model, token_ids)
        except ServerError:  # the measurement is there already, and worth more than its explanation
            text = None
        return text if text is not None else " ".join(map(str, token_ids))

    return text_of


async def explain_level(
    level: Level, records: list[RequestRecord], explainer: Explainer, place: tuple[int, float], text_of: TextOf
) -> None:
    """Set `oracle_tokens` and `miss` of every record, in the order the requests were sent. `place`: the level's number
    and the Unix time of its start."""
    level_number, started = place
    windows: list[tuple[Miss, list[int], list[int]]] = []
    for record in sorted(records, key=lambda record: (record.sent_s, record.index)):
        if record.outcome != "ok":
            continue
        served = Served(
            key=(level_number, record.index),
            session=record.session,
            prompt=level.requests[record.index].prompt_token_ids,
            output=record.token_ids,
            sent_s=started + record.sent_s,
            ready_s=started + (record.token_times_s[0] if record.token_times_s else record.ended_s),
            cached_tokens=record.cached_tokens,
            worker=record.worker,
        )
        miss = explainer.explain(served)
        record.oracle_tokens, record.miss = miss.oracle_tokens, miss
        windows.append((miss, *explainer.texts(served, miss)))
        explainer.add(served)
    texts = await gather_bounded(text_of(window) for _, own, other in windows for window in (own, other))
    for (miss, _, _), text, other_text in zip(windows, texts[::2], texts[1::2]):
        miss.text, miss.other_text = text, other_text
